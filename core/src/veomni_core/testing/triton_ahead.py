"""Compiles a kernel's Triton functions for a GPU that isn't here, and says what ptxas makes of them.

The kernel's own host code runs on the contract's samples, on the CPU, and each launch of a Triton function is compiled
for the target in place of being launched. What the host code then reads is uninitialised, so it may end early: a
function whose launch it did not reach is not compiled.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from veomni_core.descriptions.kernel_spec import KernelSpec
from veomni_core.errors import HostError
from veomni_core.ops.contract import Contract, Size
from veomni_core.testing.comparison import one_line
from veomni_core.testing.subject import Subject

# Bytes of shared memory that one block may have, by compute capability (CUDA C++ Programming Guide, "Technical
# Specifications per Compute Capability").
_SHARED = {70: 98304, 75: 65536, 80: 166912, 86: 101376, 87: 166912, 89: 101376, 90: 232448, 100: 232448, 120: 101376}
_WARP = 32
_USED = re.compile(r"Used (\d+) registers")
_SPILLED = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


@dataclass(frozen=True)
class CompiledFunction:
    """One Triton function, specialised to the arguments of a launch, as it is on the target.

    Attributes:
        name: the function's.
        constants: what it was specialised to, as ``BLOCK=512, ROWS=4``.
        warps, stages: with which it was compiled.
        registers: of each thread.
        shared_bytes: shared memory of each block.
        spilled_bytes: what each thread stores outside of its registers for want of them.
        problem: why it can't run on the target; empty if it can.
    """

    name: str
    constants: str
    warps: int
    stages: int
    registers: int
    shared_bytes: int
    spilled_bytes: int
    problem: str = ""


@dataclass(frozen=True)
class CompiledAhead:
    """What became of one kernel in one dtype.

    Attributes:
        functions: what was compiled, each specialisation once.
        failures: what can't be compiled, or can't run on the target.
        not_reached: why the host code ended early, if it did.
    """

    functions: tuple[CompiledFunction, ...]
    failures: tuple[str, ...]
    not_reached: tuple[str, ...]


def compile_ahead(spec: KernelSpec, contract: Contract, dtype: str, capability: int) -> CompiledAhead:
    """Compile what ``spec`` launches on the samples of its contract, forward and backward.

    Args:
        spec: the kernel. Triton must not run in its interpreter in this process.
        contract: that of the kernel's op and variant.
        dtype: of the samples.
        capability: the target's compute capability, such as 90.

    Raises:
        HostError: Triton, or its ptxas, is not installed here.
        KernelLoadError: the kernel can't be imported.
    """
    with _compiling_for(capability) as compiled:
        subject = Subject(spec, spec.load(), contract, torch.device("cpu"), getattr(torch, dtype))
        failures: dict[str, None] = {}
        not_reached: dict[str, None] = {}
        for size in (Size.SMALL, Size.BEYOND_A_TILE):
            for position in subject.positions(size):
                if subject.undeclared(position):
                    continue
                try:
                    sample = subject.draw(position)
                    results = subject.call(sample)
                    if spec.backward:
                        subject.gradients(results, sample)
                except Exception as error:  # the compiler's, or that of host code which read what was not computed
                    if _is_the_compilers(error):
                        failures[" ".join(str(error).split())] = None  # the place, the code, and what is wrong with it
                    else:
                        not_reached[f"at {subject.sample(position).name!r}: {one_line(error)}"] = None
    functions = tuple(dict.fromkeys(compiled))
    failures.update((f"{each.name} ({each.constants}) {each.problem}", None) for each in functions if each.problem)
    return CompiledAhead(functions, tuple(failures), tuple(not_reached))


def _is_the_compilers(error: Exception) -> bool:
    return type(error).__module__.startswith("triton.")


class _Target:
    """A driver of Triton's for a device that is not here: it says which, and nothing can be launched."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@contextmanager
def _compiling_for(capability: int) -> Iterator[list[CompiledFunction]]:
    """Compile launches for the target, and list what was compiled."""
    try:
        from triton.backends.compiler import GPUTarget
        from triton.runtime import autotuner, driver, jit
    except ImportError as error:
        raise HostError(
            f"Triton is not installed here ({error}), so nothing can be compiled; pip install triton"
        ) from error
    if _ptxas(capability) is None:
        raise HostError("Triton has no ptxas here, so nothing can be compiled for NVIDIA's GPUs; reinstall triton")

    compiled: list[CompiledFunction] = []
    measured: dict[str, tuple[int, int]] = {}
    run, bench = jit.JITFunction.run, autotuner.Autotuner._bench

    def compile_alone(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        if kernel.hash not in measured:
            measured[kernel.hash] = _resources(kernel.asm["ptx"], capability)
        compiled.append(_described(kernel, measured[kernel.hash], capability))
        return kernel

    def compile_each(self: Any, *args: Any, config: Any, **meta: Any) -> float:
        """In place of measuring a configuration: all of them are compiled."""
        self.fn.run(*args, **meta, **config.all_kwargs())
        return 1.0

    before = driver._active
    driver.set_active(_Target(GPUTarget("cuda", capability, _WARP)))  # type: ignore[arg-type]
    jit.JITFunction.run, autotuner.Autotuner._bench = compile_alone, compile_each
    try:
        yield compiled
    finally:
        jit.JITFunction.run, autotuner.Autotuner._bench = run, bench
        driver._active = before


def _described(kernel: Any, resources: tuple[int, int], capability: int) -> CompiledFunction:
    registers, spilled = resources
    metadata, most = kernel.metadata, _SHARED.get(capability)
    problem = (
        f"needs {metadata.shared:,} bytes of shared memory, and a block of sm{capability} has {most:,}"
        if most is not None and metadata.shared > most
        else ""
    )
    names = kernel.src.fn.arg_names
    constants = {names[place]: value for (place, *_), value in kernel.src.constants.items()}
    return CompiledFunction(
        metadata.name,
        ", ".join(f"{name}={value}" for name, value in constants.items()),
        metadata.num_warps,
        metadata.num_stages,
        registers,
        metadata.shared,
        spilled,
        problem,
    )


def _resources(ptx: str, capability: int) -> tuple[int, int]:
    """Registers of each thread and bytes that it spills, as ptxas reports them."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        arch = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)
        command = [str(_ptxas(capability)), "-v", f"--gpu-name={arch[1] if arch else f'sm_{capability}'}"]
        done = subprocess.run(
            [*command, str(source), "-o", str(Path(folder) / "kernel.cubin")], capture_output=True, text=True
        )
    used, spilled = _USED.search(done.stderr), _SPILLED.search(done.stderr)
    if done.returncode or used is None:
        raise HostError(f"ptxas says nothing of the registers of a kernel: {done.stderr.strip()[-300:]}")
    return int(used[1]), int(spilled[2]) if spilled else 0


def _ptxas(capability: int) -> Path | None:
    from triton import knobs

    try:
        tool = knobs.nvidia.ptxas_blackwell if capability >= 100 else knobs.nvidia.ptxas
        return Path(tool.path)
    except (RuntimeError, AttributeError):
        return None
