"""A reversible change of the ``forward`` that other code has put on one module's instance."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Hashable
from types import MethodType
from typing import Any

from torch import nn


class InstanceForwardChange:
    """Puts a function of ``(self, ...)`` in the place of the ``forward`` in a module's own ``__dict__``.

    A forward there hides the class's, so :class:`~veomni_core.changes.change.ForwardChange` can't be used. The function
    becomes a method, and a deep copy of the change belongs to the copied module.

    Args:
        module: a module with a ``forward`` of its own, such as those that tensor parallelism puts on linears.
        forward: the new ``forward``.

    Example:
        >>> import torch
        >>> linear = nn.Linear(2, 2)
        >>> own = linear.forward = lambda input: input + 1
        >>> change = InstanceForwardChange(linear, lambda self, input: own(input) * self.out_features)
        >>> change.apply()
        >>> linear(torch.zeros(2))
        tensor([2., 2.])
        >>> change.revert()
        >>> linear.forward is own
        True
    """

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self._target = weakref.ref(module)
        self._value = MethodType(forward, module)
        self._before: Any = None

    @property
    def target(self) -> Any:
        """The module, or ``None`` once it is freed."""
        return self._target()

    def apply(self) -> None:
        own = vars(self.target)
        self._before, own["forward"] = own["forward"], self._value

    @property
    def place(self) -> Hashable:
        return (id(self.target), "forward")

    def overridden(self) -> str:
        target = self.target
        kept = target is None or vars(target).get("forward") is self._value
        return "" if kept else f"{type(target).__name__}.forward was replaced"

    def revert(self) -> None:
        target = self.target
        if target is not None and vars(target).get("forward") is self._value:
            vars(target)["forward"] = self._before

    def __deepcopy__(self, memo: dict[int, Any]) -> InstanceForwardChange:
        duplicate = copy.copy(self)
        if self.target is not None:
            duplicate._target = weakref.ref(copy.deepcopy(self.target, memo))
            duplicate._value = copy.deepcopy(self._value, memo)
            duplicate._before = copy.deepcopy(self._before, memo)
        return duplicate
