"""A GPU that is not here, for the host's side of Triton: kernels are compiled for it, and a launch of one does nothing.

All that Python does is as with a real one, up to the call of Triton's launcher in C: arguments are bound and
specialised, the compiled kernel is looked up, TMA descriptors are made. Tensors are the CPU's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

CAPABILITY = 90
_SHARED_BYTES = 232448  # of one block on sm90 (CUDA C++ Programming Guide, "Technical Specifications")


def _nothing(*_: Any) -> None:
    pass


class _Driver:
    """What Triton asks of a driver."""

    def __init__(self, target: Any, launcher: type) -> None:
        self._target, self.launcher_cls, handles = target, launcher, count(1)
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": _SHARED_BYTES, "multiprocessor_count": 132},
            load_binary=lambda name, binary, shared, device: (object(), next(handles), 0, 0, 1024),
            fill_tma_descriptor=_nothing,
        )

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def stand_in_gpu() -> Iterator[None]:
    """Let Triton take CPU tensors for those of a GPU that is not here. Not with ``TRITON_INTERPRET``."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia import driver as nvidia
    from triton.runtime import driver

    # Triton compiles a launcher in C for each signature. In its place stands a call that does nothing.
    module = SimpleNamespace(launch=_nothing)
    with ExitStack() as stack:
        for name in ("make_launcher", "library_dirs", "include_dirs"):
            stack.enter_context(patch.object(nvidia, name, _nothing))
        stack.enter_context(patch.object(nvidia, "compile_module_from_src", lambda **_: module))
        before = driver._active
        stack.callback(setattr, driver, "_active", before)
        driver.set_active(_Driver(GPUTarget("cuda", CAPABILITY, 32), nvidia.CudaLauncher))
        yield
