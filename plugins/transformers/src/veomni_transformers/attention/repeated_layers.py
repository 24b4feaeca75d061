"""Skips layers that repeat an earlier one: on zeros they return what that one returned for the same arguments."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor, nn

from veomni_core.sites.walk import named_modules
from veomni_transformers.attention.layer_forms import form_of, is_setting


class RepeatedLayers:
    """The results of the layers that ran in the current run, by their form and their arguments."""

    def __init__(self) -> None:
        self._given: dict[Hashable, Any] = {}
        self._kept_alive: list[Any] = []  # keys hold ids: if an argument were freed, another object could get its id
        self._always: frozenset[str] = frozenset()
        self._ran: set[str] = set()

    def begin_run(self, always: frozenset[str]) -> None:
        """To be called before each run. The layers in ``always`` are never skipped."""
        self._given.clear()
        self._kept_alive.clear()
        self._always, self._ran = always, set()

    @property
    def ran(self) -> frozenset[str]:
        """The layers that the current run did not skip."""
        return frozenset(self._ran)

    def forward_of(self, layer: nn.Module, path: str, form: Hashable, left_out: Callable[[str], None]) -> Any:
        """A forward that runs ``layer`` only for arguments that no layer of its form has had before in this run."""
        run = layer.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            key = (
                form,
                tuple(map(_argument, range(len(args)), args)),
                tuple((n, _argument(n, kwargs[n])) for n in kwargs),
            )
            if key in self._given and path not in self._always:
                left_out(path)
            else:
                self._ran.add(path)
                self._kept_alive += [args, kwargs]
                self._given[key] = run(*args, **kwargs)
            return self._given[key]

        return forward


def skip_repeated_layers(twin: nn.Module, left_out: Callable[[str], None]) -> RepeatedLayers:
    """Let the layers in each ``ModuleList`` of ``twin`` run once per form and arguments.

    Layers have the same form if their classes, settings and sizes are equal, apart from their index in the list.
    ``left_out`` is called with the path of each layer that is skipped.
    """
    repeated = RepeatedLayers()
    forms: dict[Hashable, int] = {}  # a number for each: a form is a tree, which would be hashed in every run
    for path, module in named_modules(twin):
        if isinstance(module, nn.ModuleList) and len(module) > 1:
            for index, layer in enumerate(module):
                inner = f"{path}.{index}" if path else str(index)
                form = forms.setdefault((path, form_of(layer, index)), len(forms))
                vars(layer)["forward"] = repeated.forward_of(layer, inner, form, left_out)
    return repeated


def _argument(name: Any, value: Any) -> Hashable:
    """The key of an argument: shape and dtype of hidden states, as they are zeros; else its plain value or its id."""
    if isinstance(value, Tensor) and name in (0, "hidden_states"):
        return tuple(value.shape), value.dtype
    if isinstance(value, tuple):
        return tuple(_argument(None, each) for each in value)
    return value if value is None or is_setting(value) else id(value)
