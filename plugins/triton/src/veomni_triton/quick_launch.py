"""Launches a compiled kernel with less of the Python than Triton puts before it.

Triton's own launch builds dictionaries, a text and hooks' arguments anew each time. This one asks Triton's own function
how the arguments specialise a kernel, looks up the compiled one by that, and calls it as Triton would. Triton itself is
called for whatever is not known yet, and where anything waits to see launches: profilers, debuggers, hooks.

Off unless ``VEOMNI_QUICK_LAUNCH=1`` is set when this plugin is imported: it was compared with Triton's launch on a CPU,
where a stand-in records what would reach the GPU, and not run on one yet.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import partial
from itertools import repeat
from operator import itemgetter
from typing import Any

import triton
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver, jit

_IS_ASKED = os.environ.get("VEOMNI_QUICK_LAUNCH") == "1"
# Whose launch this was read against. Others launch by their own.
_IS_KNOWN = triton.__version__.split(".")[:2] == ["3", "6"]


def quick_launch(function: Any) -> Any:
    """Decorates a kernel beneath ``triton.jit``, for hosts that launch it as ``kernel[grid](…)`` with a tuple as grid.

    Args:
        function: What ``triton.jit`` made.

    Returns:
        What is launched in the same way; ``function`` itself unless ``VEOMNI_QUICK_LAUNCH=1``, in Triton's interpreter,
        and with another Triton than 3.6.
    """
    return QuickLaunch(function) if _IS_ASKED and _IS_KNOWN and type(function) is jit.JITFunction else function


class QuickLaunch:
    """A kernel that is launched quickly: ``kernel[grid](…)``."""

    def __init__(self, function: jit.JITFunction[Any]) -> None:
        self._function = function
        self._forms: dict[tuple[Any, ...], _Form] = {}
        self._compiled: dict[tuple[Any, ...], CompiledKernel] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], /, *arguments: Any, **others: Any) -> None:
        if self._is_watched():
            self._function[grid](*arguments, **others)
            return
        key = (len(arguments), *others)
        form = self._forms.get(key)
        if form is None:
            form = self._forms[key] = _Form(self._function, len(arguments), others)
        values = (*arguments, *form.named(others))
        active = driver.active
        device = active.get_current_device()
        known = (active, device, key, form.fixed(values), form.options(others), *form.specialisations(values))
        kernel = self._compiled.get(known)
        if kernel is None:
            launched = self._function[grid](*arguments, **others)
            if type(launched) is CompiledKernel:
                self._compiled[known] = launched
            return
        kernel.run(
            *grid,
            *_ONES[len(grid)],
            active.get_current_stream(device),
            kernel.function,
            kernel.packed_metadata,
            None,  # for hooks, of which there are none, as the next two
            None,
            None,
            *values,
        )

    def _is_watched(self) -> bool:
        enter, exit = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
        return bool(
            type(enter) is not knobs.HookChain
            or type(exit) is not knobs.HookChain
            or enter.calls
            or exit.calls
            or knobs.runtime.debug
            or knobs.compilation.instrumentation_mode
            or self._function.pre_run_hooks
            or jit.JITFunction.run.__module__ != jit.JITFunction.__module__  # replaced, to compile without a launch
        )


_ONES = ((), (1, 1), (1,), ())  # the dimensions that a grid lacks, by those that it has


class _Form:
    """A way to write a launch: so many positional arguments, and these names. What follows from it is found once."""

    def __init__(self, function: jit.JITFunction[Any], positional: int, names: Iterable[str]) -> None:
        parameters = function.params
        known = {parameter.name for parameter in parameters}
        run_time = [each for each in parameters if not each.is_constexpr]
        self.named = _getter([each.name for each in parameters[positional:]])
        self.options = _getter([name for name in names if name not in known])
        self.fixed = _getter([each.num for each in parameters if each.is_constexpr])
        self._run_time = _getter([each.num for each in run_time])
        self._by_value = tuple(not each.do_not_specialize for each in run_time)
        self._by_alignment = tuple(not each.do_not_specialize_on_alignment for each in run_time)
        *_, backend, _ = function.device_caches[driver.active.get_current_device()]
        self._backend = backend

    def specialisations(self, values: tuple[Any, ...]) -> Iterable[Any]:
        """Dtypes, alignments and divisibilities that the kernel is compiled for, by Triton's own judgement."""
        return map(
            jit.native_specialize_impl,
            repeat(self._backend),
            self._run_time(values),
            repeat(False),  # no pointer is declared const
            self._by_value,
            self._by_alignment,
        )


def _getter(keys: list[Any]) -> Callable[[Any], tuple[Any, ...]]:
    """``itemgetter``, but its results are tuples for any number of keys."""
    if len(keys) > 1:
        return itemgetter(*keys)
    if not keys:
        return lambda values: ()
    (key,) = keys
    return lambda values: (values[key],)
