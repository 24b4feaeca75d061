"""Keeps what is not the op's out of a module's time: children that run before the kernel give what they gave once.

An attention's projections and norms, an MLP's first linears, the decoder beneath a loss: they cost the same whichever
kernel runs, often far more than it does, and their noise would hide the difference.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from veomni_tools.tuning.leaves import as_leaves

Function = Callable[..., Any]


@dataclass
class Replay:
    """What the children of one module gave in one call.

    Attributes:
        results: for each child that ran before the kernel, its results, in the order of its calls.
        skipped_output: the module's last linear, which no kernel covers: identity replaces it, so that only what comes
            before it is timed. Empty if there is none.
    """

    results: dict[str, list[Any]] = field(default_factory=dict)
    skipped_output: str = ""

    @contextmanager
    def in_place_of_children(self, module: nn.Module) -> Iterator[None]:
        """Let the children of ``module`` give the recorded results, in each call of it the same."""
        children: Mapping[str, Any] = module._modules
        stand_ins: dict[str, Function] = {name: _given(results) for name, results in self.results.items()}
        if self.skipped_output:
            stand_ins[self.skipped_output] = lambda input: input
        try:
            for name, stand_in in stand_ins.items():
                vars(children[name])["forward"] = stand_in
            yield
        finally:
            for name in stand_ins:
                vars(children[name]).pop("forward", None)


class Recorder:
    """Records, in one call of ``module``, what its children give until :meth:`mark` is called.

    Args:
        module: the module.
        wanted: the names of the children that may be replayed.
    """

    def __init__(self, module: nn.Module, wanted: Collection[str]) -> None:
        self._module, self._wanted = module, wanted
        self._marked = False
        self._last: tuple[str, Any] = ("", None)
        self._replay = Replay()

    def marking(self, function: Function) -> Function:
        """``function``, whose first call is the mark."""

        def marked(*args: Any, **kwargs: Any) -> Any:
            self._marked = True
            return function(*args, **kwargs)

        return marked

    def record(self, run: Function) -> Replay:
        """Call ``run``, which calls the module, and return what its children gave before the mark."""
        handles = []

        def recording(name: str) -> Any:
            def hook(child: nn.Module, args: Any, result: Any) -> None:
                self._last = (name, result)
                if not self._marked:
                    self._replay.results.setdefault(name, []).append(as_leaves(result))

            return hook

        try:
            for name in self._wanted:
                handles += [self._module.get_submodule(name).register_forward_hook(recording(name))]
            result = run()
        finally:
            for handle in handles:
                handle.remove()
        name, last = self._last
        first = result[0] if isinstance(result, (tuple, list)) else result
        runs_after = self._marked and name != "" and name not in self._replay.results
        if runs_after and first is last and type(self._module._modules[name]) is nn.Linear:
            self._replay.skipped_output = name
        return self._replay


def replayable(module: nn.Module, touched: Collection[nn.Module]) -> set[str]:
    """The children of ``module`` that have parameters and that no kernel touches.

    One without parameters, such as an activation function, may be a part of the op.
    """
    return {
        name
        for name, child in module.named_children()
        if any(True for _ in child.parameters()) and not any(each in touched for each in child.modules())
    }


def _given(results: list[Any]) -> Function:
    """A forward that gives ``results``, one after the other, again and again."""
    turns = itertools.cycle(results)
    return lambda *args, **kwargs: next(turns)
