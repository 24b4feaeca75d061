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

from veomni_conformance.triton_targets import Target
from veomni_core.descriptions.hardware import Hardware
from veomni_ops import triton_gpus


def _nothing(*_: Any) -> None:
    pass


@contextmanager
def stand_in_gpu() -> Iterator[None]:
    """Let Triton take CPU tensors for those of an H200 that is not here. Not with ``TRITON_INTERPRET``."""
    from triton.backends.nvidia import driver as nvidia
    from triton.runtime import driver

    # What compiles has all that is asked but launches: kernels are loaded, and descriptors filled, by doing nothing.
    stand_in, handles = Target.of(Hardware.named("h200")).driver(), count(1)
    stand_in.launcher_cls = nvidia.CudaLauncher
    stand_in.utils.load_binary = lambda name, binary, shared, device: (object(), next(handles), 0, 0, 1024)
    stand_in.utils.fill_tma_descriptor = _nothing
    # Triton compiles a launcher in C for each signature. In its place stands a call that does nothing.
    module = SimpleNamespace(launch=_nothing)
    with ExitStack() as stack:
        for name in ("make_launcher", "library_dirs", "include_dirs"):
            stack.enter_context(patch.object(nvidia, name, _nothing))
        stack.enter_context(patch.object(nvidia, "compile_module_from_src", lambda **_: module))
        before = driver._active
        stack.callback(setattr, driver, "_active", before)
        driver.set_active(stand_in)
        # A real GPU's properties are cached; the CPU's stand-in would be queried at each launch.
        gpu = triton_gpus._current()
        stack.enter_context(patch.object(triton_gpus, "_current", lambda: gpu))
        yield
