"""Layers that repeat an earlier one: in a run on zeros they give what the earlier one gave for the same arguments."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor, nn


class RepeatedLayers:
    """What the layers of each form gave in the present run."""

    def __init__(self) -> None:
        self._given: dict[Hashable, Any] = {}
        self._kept_alive: list[Any] = []  # or another object could get an identity that stands in a key
        self._always: frozenset[str] = frozenset()
        self._ran: set[str] = set()

    def begin_run(self, always: frozenset[str]) -> None:
        """Before each run; the layers in ``always`` run whatever they are given."""
        self._given.clear()
        self._kept_alive.clear()
        self._always, self._ran = always, set()

    @property
    def ran(self) -> frozenset[str]:
        """The layers that the present run did not leave out."""
        return frozenset(self._ran)

    def forward_of(self, layer: nn.Module, path: str, form: Hashable, left_out: Callable[[str], None]) -> Any:
        """A forward that runs ``layer`` once for each set of arguments that layers of its form get."""
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
    """Let the layers in the lists of ``twin`` run once per form; ``left_out`` is told the path of each one that isn't.

    They are of one form where their code, settings and sizes are equal, their number in the list aside.
    """
    repeated = RepeatedLayers()
    for path, module in list(twin.named_modules()):
        if isinstance(module, nn.ModuleList) and len(module) > 1:
            for index, layer in enumerate(module):
                inner = f"{path}.{index}" if path else str(index)
                vars(layer)["forward"] = repeated.forward_of(layer, inner, (path, _form(layer, index)), left_out)
    return repeated


def _form(module: nn.Module, index: int) -> Hashable:
    own = {name: value for name, value in vars(module).items() if _is_setting(value)}
    settings = tuple(sorted((n, repr(value)) for n, value in own.items() if type(value) is not int or value != index))
    shapes = tuple((name, None if value is None else value.shape) for name, value in module._parameters.items())
    children = tuple((name, None if m is None else _form(m, index)) for name, m in module._modules.items())
    return type(module), settings, shapes, children, id(vars(module).get("config"))


def _is_setting(value: Any) -> bool:
    return isinstance(value, bool | int | float | str)


def _argument(name: Any, value: Any) -> Hashable:
    """Hidden states by their shape, since they are zeros; anything else by identity, or by value where it is plain."""
    if isinstance(value, Tensor) and name in (0, "hidden_states"):
        return tuple(value.shape), value.dtype
    if isinstance(value, tuple):
        return tuple(_argument(None, each) for each in value)
    return value if value is None or _is_setting(value) else id(value)
