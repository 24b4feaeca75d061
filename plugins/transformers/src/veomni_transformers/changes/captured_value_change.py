"""A reversible change to what the ``forward`` of one module has captured."""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from types import CellType
from typing import Any

from torch import nn

from veomni_core.errors import BindingError
from veomni_transformers.captured_cells import captured_cell


class CapturedValueChange:
    """Sets a variable that the forward in one module's own ``__dict__`` has captured. The module is referenced weakly.

    A copy of the module has the same forward, and so the same variable: it is not changed apart from the original.

    Args:
        module: the module.
        name: the variable's name in the forward's code.
        value: what it is set to.

    Example:
        >>> linear = nn.Linear(4, 4)
        >>> def wrapped(factor):
        ...     def forward(input):
        ...         return input * factor
        ...
        ...     return forward
        >>> linear.forward = wrapped(2)
        >>> change = CapturedValueChange(linear, "factor", 3)
        >>> change.apply()
        >>> linear(5)
        15
        >>> change.revert()
        >>> linear(5)
        10
    """

    around_forward = True  # what the instance's own forward has captured runs around that of the class

    def __init__(self, module: nn.Module, name: str, value: Any) -> None:
        self._target = weakref.ref(module)
        self.name, self.value = name, value
        self._before: Any = None

    @property
    def target(self) -> Any:
        """The module, or ``None`` once it is freed."""
        return self._target()

    def apply(self) -> None:
        """Set the variable.

        Raises:
            BindingError: the module has no forward of its own that has captured it.
        """
        cell = self._cell()
        if cell is None:
            raise BindingError(f"the forward of {type(self.target).__name__} captures no {self.name!r}")
        self._before, cell.cell_contents = cell.cell_contents, self.value

    @property
    def place(self) -> Hashable:
        return (id(self.target), "forward", self.name)

    def overridden(self) -> str:
        if self.target is None:
            return ""
        cell = self._cell()
        if cell is not None and cell.cell_contents is self.value:
            return ""
        return f"the {self.name} that its forward has captured was replaced"

    def revert(self) -> None:
        cell = self._cell()
        if cell is not None and cell.cell_contents is self.value:
            cell.cell_contents = self._before

    def __deepcopy__(self, memo: dict[int, Any]) -> CapturedValueChange:
        duplicate = CapturedValueChange(memo.get(id(self.target), self.target), self.name, self.value)
        duplicate._before = self._before
        return duplicate

    def _cell(self) -> CellType | None:
        module = self.target
        own = None if module is None else vars(module).get("forward")
        return None if own is None else captured_cell(own, self.name)
