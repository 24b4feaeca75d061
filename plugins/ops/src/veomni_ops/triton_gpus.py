"""What kernels in Triton ask of the GPU that they run on: grids and tiles are sized by it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True)
class Gpu:
    """A GPU, as far as launches depend on it.

    Attributes:
        multiprocessors: how many there are. Grids of persistent programs are sized by it.
        shared_bytes: shared memory that one program may have.
        has_copy_engine: whether tiles can be loaded and stored through TMA descriptors.
        limits_registers: whether a launch may say how many registers a thread has at most. Triton's compiler for AMD's
            GPUs takes no such limit.
        is_hopper: whether it is an H100, H200 or the like.

    Example:
        >>> rtx_5090 = Gpu(multiprocessors=170, shared_bytes=99 << 10, has_copy_engine=True, limits_registers=True)
        >>> rtx_5090.is_hopper
        False
    """

    multiprocessors: int
    shared_bytes: int
    has_copy_engine: bool
    limits_registers: bool
    is_hopper: bool = False


# Where Triton's interpreter runs one program after another.
_INTERPRETED = Gpu(multiprocessors=2, shared_bytes=1 << 30, has_copy_engine=False, limits_registers=True)


def gpu_of(device: torch.device) -> Gpu:
    """The GPU that ``device`` is. For a CPU, the one that Triton's driver stands in for while it compiles ahead.

    Example:
        >>> gpu_of(torch.device("cpu")).multiprocessors >= 2  # 2 in Triton's interpreter
        True
    """
    if device.type == "cuda":
        return _detected(device)
    from triton import knobs

    return _INTERPRETED if knobs.runtime.interpret else _current()


def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of ``device``; two in Triton's interpreter.

    Example:
        >>> multiprocessors(torch.device("cpu")) >= 2
        True
    """
    return gpu_of(device).multiprocessors


def register_limit(device: torch.device, registers: int | None) -> dict[str, int | None]:
    """The option of a launch on ``device`` whose threads have so many registers at most; ``None`` for no limit.

    Example:
        >>> register_limit(torch.device("cpu"), 128)
        {'maxnreg': 128}
    """
    return {"maxnreg": registers} if gpu_of(device).limits_registers else {}


@cache
def _detected(device: torch.device) -> Gpu:
    with torch.cuda.device(device):
        return _current()


def _current() -> Gpu:
    from triton.runtime import driver  # of plugins with kernels in Triton: this package doesn't require it

    target, here = driver.active.get_current_target(), driver.active.get_current_device()
    properties = driver.active.utils.get_device_properties(here)
    is_nvidia = target.backend == "cuda"
    return Gpu(
        properties.get("multiprocessor_count") or properties["num_vectorcore"],  # the latter is triton-ascend's
        properties["max_shared_mem"],
        # The architectures of AMD's GPUs are names; torch has compute capabilities for them that mean something else.
        has_copy_engine=is_nvidia and target.arch >= 90,
        limits_registers=is_nvidia,
        is_hopper=is_nvidia and target.arch == 90,
    )
