"""Which of transformers' experts implementations runs in a module, and how the module's eager code is selected.

transformers wraps the ``forward`` of an experts class. The wrapper looks up the implementation that the config names
(``grouped_mm``, ``batched_mm``, ...) in every call, and calls the wrapped eager code where it names none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

from veomni_core.changes.change import ForwardChange
from veomni_core.descriptions.kernel_spec import EAGER
from veomni_core.errors import BindingError
from veomni_transformers.forwards.eager_experts import SELECTED_BY, eager_until_set
from veomni_transformers.proving.code_reading import Reading, Readings
from veomni_transformers.proving.functions import code_layers, current_forward
from veomni_transformers.proving.of_others import function_of_others

Function = Callable[..., Any]


def selected_implementation(module: nn.Module) -> str:
    """The implementation that runs in ``module`` while nothing is bound: ``eager``, or the one its config names."""
    return _named(module) if is_dispatched(module) else EAGER


def is_dispatched(module: nn.Module) -> bool:
    """Whether the forward of ``module`` looks up in its config which implementation to run."""
    return any(SELECTED_BY in layer.__code__.co_names for layer in code_layers(current_forward(module)))


def table_of(module: nn.Module) -> Mapping[str, Any] | None:
    """The table in which the forward of ``module`` looks its implementation up; ``None`` if it looks none up."""
    for layer in code_layers(current_forward(module)):
        if SELECTED_BY in layer.__code__.co_names:
            held = (cell.cell_contents for cell in layer.__closure__ or ())
            return next((each for each in held if isinstance(each, Mapping)), None)
    return None


def implementation(module: nn.Module) -> Any:
    """The function that runs in ``module`` in the place of its class's eager code; ``None`` if that code runs."""
    table = table_of(module)
    return None if table is None else table.get(selected_implementation(module))


def is_of_others(module: nn.Module) -> bool:
    """Whether other code than transformers has registered the implementation that runs in ``module``."""
    table = table_of(module)
    return table is not None and function_of_others(table, selected_implementation(module)) is not None


def with_implementation(module: nn.Module, readings: Readings) -> Reading:
    """What the module's code reads, and the implementation: a gate's method, whether there are biases."""
    return readings.of(module, implementation(module))


class ExpertsChange(ForwardChange):
    """Puts a kernel in the place of what the module's config selects, which is remembered."""

    def __init__(self, module: nn.Module, forward: Function, guarded: Iterable[str] = ()) -> None:
        super().__init__(module, forward, guarded)
        self._selected = _named(module) if is_dispatched(module) else ""

    def written(self) -> str:
        """Also a selection in the config since: the kernel goes on computing what was selected before."""
        module = self.target
        is_bound = module is not None and self._bound is not None and isinstance(module, self._bound)
        now = _named(module) if is_bound and self._selected else self._selected
        news = f"its experts were set from {self._selected} to {now} after bind, and the kernel computes the former"
        return "; ".join(filter(None, (super().written(), news if now != self._selected else "")))


class EagerExpertsChange(ForwardChange):
    """Runs a module's eager code in place of what its config names, until the config is set to something else.

    It is a change of the module, not of the config: layers that share one config may be bound differently.
    """

    def __init__(self, module: nn.Module, forward: Function | None = None, guarded: Iterable[str] = ()) -> None:
        super().__init__(module, forward or _eager_until_set(module), guarded)

    def overridden(self) -> str:
        module = self.target
        if module is not None and (found := _named(module)) != vars(self.forward)["named_at_bind"]:
            return f"its experts were set to {found}"
        return super().overridden()


def _eager_until_set(module: nn.Module) -> Function:
    """A forward that runs the module's eager code for as long as the config names the implementation it names now.

    Raises:
        BindingError: this version of transformers selects the implementation in another way.
    """
    dispatched, named_at_bind = current_forward(module), _named(module)
    eager = getattr(dispatched, "__wrapped__", None)
    if eager is None:
        raise BindingError(
            f"the eager code of {type(module).__name__} can't be selected: its config selects {named_at_bind!r}, in a "
            "way that veomni-core does not know. Build the model with experts_implementation='eager'"
        )
    return eager_until_set(eager, dispatched, named_at_bind)


def _named(module: nn.Module) -> str:
    return str(getattr(vars(module).get("config"), SELECTED_BY, None) or EAGER)
