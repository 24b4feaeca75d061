"""Launches of kernels in Triton that cost the host little: what was compiled is looked up by one flat key.

Triton's own path takes 6 to 19 microseconds, half of them for options and metadata that are the same every time, and
this one 3 to 13. Among other calls, whose code displaces it from the processor's caches, the difference is 5 to 9.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache, partial
from itertools import repeat
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # this package doesn't require Triton
    from triton.runtime import JITFunction


def triton_kernel(function: Any = None, **options: Any) -> Any:
    """``triton.jit`` for a function that the host launches, and none that another calls.

    Args:
        function: the kernel.
        options: those of ``triton.jit``.

    Returns:
        The kernel, whose launches have constants and options by name, and other arguments by position.

    Example:
        >>> triton_kernel(do_not_specialize=["rows"])  # decorates a function
        functools.partial(<function triton_kernel at ...>, do_not_specialize=['rows'])
    """
    if function is None:
        return partial(triton_kernel, **options)
    import triton

    kernel = triton.jit(function, **options)
    return _Launcher(kernel) if isinstance(kernel, triton.JITFunction) and _is_known(triton.__version__) else kernel


@cache
def _is_known(version: str) -> bool:
    """Whether this Triton's key and launcher in C, which are internals of it, are those that are used here."""
    if known := version.startswith("3.6."):
        return known
    logging.getLogger(__name__).warning("Triton %s: launches take its own, slower path", version)
    return False


class _Launcher:
    """Launches ``kernel`` as Triton does, and has all attributes of it."""

    def __init__(self, kernel: JITFunction[..., Any]) -> None:
        from triton import knobs
        from triton.runtime import driver, jit

        self.kernel, params = kernel, kernel.params
        self._knobs, self._drivers, self._specialized = knobs, driver, jit.native_specialize_impl
        self._driver: Any = None
        self._backend: Any = None
        self._found: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        self._globals: list[tuple[dict[str, Any], str, Any]] = []
        of_each = [(p.is_const, not p.do_not_specialize, not p.do_not_specialize_on_alignment) for p in params]
        self._flags = tuple(zip(*of_each, strict=True))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernel, name)

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return partial(self.launch, grid)

    def launch(self, grid: tuple[int, ...], *args: Any, **constants: Any) -> Any:
        """Launch ``kernel[grid](*args, **constants)``, and return the compiled kernel."""
        active = self._drivers.active
        device = active.get_current_device()
        if active is not self._driver:
            self._driver, self._backend, self._found = active, self.kernel.device_caches[device][3], {}
        # All that Triton's own key has: what each argument is specialised to, and all constants and options.
        specialized = map(self._specialized, repeat(self._backend), args, *self._flags)
        key = (device, *specialized, *constants, *constants.values())
        found, is_watched = self._found.get(key), self._is_watched()
        if found is None or is_watched or callable(grid):
            params = self.kernel.params
            misplaced = [param.name for param in params if param.is_constexpr == (param.num < len(args))]
            if misplaced:
                raise TypeError(
                    f"{self.kernel.__name__} takes its constants by name and all else by place: {misplaced}"
                )
            compiled = self.kernel[grid](*args, **constants)
            # A debugger's kernel is another; and there is none to launch where Triton compiles ahead of time.
            if not is_watched and getattr(compiled, "function", None):
                self._found[key] = self._prepared(compiled, len(args), constants)
            return compiled
        compiled, launch, before, after = found
        x, y, z = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
        launch(x, y, z, active.get_current_stream(device), *before, *args, *after)
        return compiled

    def _is_watched(self) -> bool:
        """Whether Triton has more to do than to launch: for a profiler or debugger, or to refuse a changed global."""
        for scope, name, value in self._globals:
            if scope.get(name) is not value:
                return True
        runtime = self._knobs.runtime
        return bool(
            self.kernel.pre_run_hooks
            or runtime.debug
            or getattr(runtime.launch_enter_hook, "calls", True)
            or getattr(runtime.launch_exit_hook, "calls", True)
            or self._knobs.compilation.instrumentation_mode
        )

    def _prepared(self, compiled: Any, count: int, constants: dict[str, Any]) -> tuple[Any, ...]:
        """The launch, and what goes before and after the first ``count`` arguments."""
        after = tuple(constants.get(param.name, param.default) for param in self.kernel.params[count:])
        used = self.kernel.used_global_vals
        self._globals = [(scope, name, scope.get(name)) for (name, _), (_, scope) in used.items()]
        launch, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
        is_cuda = type(launch).__name__ == "CudaLauncher"  # by name: not every Triton has NVIDIA's backend
        if is_cuda and not (launch.global_scratch_size or launch.profile_scratch_size):
            flags = launch.launch_cooperative_grid, launch.launch_pdl
            return compiled, launch.launch, (function, *flags, None, None, metadata, None, None, None), after
        return compiled, launch, (function, metadata, None, None, None), after
