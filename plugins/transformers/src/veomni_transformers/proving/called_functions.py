"""For ops that are a function of the modeling file: finds the modules that call it, and replaces it in one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from veomni_core.changes.change import Change, ForwardChange
from veomni_core.sites.site import Kernel
from veomni_core.sites.walk import named_modules
from veomni_transformers.proving.code_reading import set_on_instance, why_not_clonable
from veomni_transformers.proving.functions import current_forward, global_functions, with_globals, within_layer

Function = Callable[..., Any]


@dataclass(frozen=True)
class Caller:
    """A module whose ``forward`` calls ``functions`` by their global names.

    A global may be a layer that the package ``kernels`` made of a function; ``functions`` has the function itself.
    ``why_not`` is the reason why they can't be replaced there; empty if they can.
    """

    path: str
    module: nn.Module
    forward: Function
    functions: Mapping[str, Function]
    why_not: str


def callers(model: nn.Module, is_wanted: Callable[[str], Any]) -> Iterator[Caller]:
    """The modules of ``model`` whose forward names a global for which ``is_wanted(name)``."""
    wanted: dict[Function, dict[str, Any]] = {}  # of each forward: most modules share theirs with others
    for path, module in named_modules(model):
        own = set_on_instance(module)
        forward = type(module).forward if own else current_forward(module)
        if forward not in wanted:
            named = (each for each in global_functions(forward) if is_wanted(each[0]))
            wanted[forward] = {name: within_layer(value) for name, value in named}
        if functions := wanted[forward]:
            yield Caller(path, module, forward, functions, own or why_not_clonable(forward, functions))


def replaced(module: nn.Module, names: str | Iterable[str], kernel: Kernel) -> Iterator[Change]:
    """The change by which ``module`` calls ``kernel`` where its forward names one of the functions ``names``."""
    names = (names,) if isinstance(names, str) else names
    yield ForwardChange(module, with_globals(current_forward(module), dict.fromkeys(names, kernel)))
