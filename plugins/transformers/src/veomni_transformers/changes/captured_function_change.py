"""A reversible change to a function that the ``forward`` of one module runs, beneath whatever wraps it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any

from torch import nn

from veomni_core.changes.forward_functions import captures, replace_captured
from veomni_core.errors import BindingError


class CapturedFunctionChange:
    """Replaces a function that the ``forward`` in one module's own ``__dict__`` is or has captured.

    Other code has put it there, and wrappers of yet other code, as accelerate's for mixed precision, may hold it. The
    module is referenced weakly.

    Args:
        module: a module with a ``forward`` of its own.
        old: the function of ``(self, ...)`` that runs there.
        new: what runs in its place.

    Example:
        >>> import torch
        >>> from types import MethodType
        >>> linear, doubled = nn.Linear(2, 2), lambda self, input: 2 * input
        >>> linear.forward = MethodType(doubled, linear)
        >>> change = CapturedFunctionChange(linear, doubled, lambda self, input: 3 * input)
        >>> change.apply()
        >>> linear(torch.ones(2))
        tensor([3., 3.])
        >>> change.revert()
        >>> linear(torch.ones(2))
        tensor([2., 2.])
    """

    def __init__(self, module: nn.Module, old: Callable[..., Any], new: Callable[..., Any]) -> None:
        self._target = weakref.ref(module)
        self.old, self.new = old, new

    @property
    def target(self) -> Any:
        """The module, or ``None`` once it is freed."""
        return self._target()

    def apply(self) -> None:
        """Put the new function in the place of the old one.

        Raises:
            BindingError: the module's own forward does not run the old one.
        """
        if not replace_captured(self.target, self.old, self.new):
            raise BindingError(f"the forward of {type(self.target).__name__} does not run {self.old.__qualname__}")

    @property
    def place(self) -> Hashable:
        return (id(self.target), "forward", self.old)

    def overridden(self) -> str:
        if self.target is None or self._is_in_place():
            return ""
        return f"the {self.new.__qualname__} in its forward was replaced"

    def revert(self) -> None:
        if self.target is not None and self._is_in_place():
            replace_captured(self.target, self.new, self.old)

    def __deepcopy__(self, memo: dict[int, Any]) -> CapturedFunctionChange:
        return CapturedFunctionChange(memo.get(id(self.target), self.target), self.old, self.new)

    def _is_in_place(self) -> bool:
        own = vars(self.target).get("forward")
        return own is not None and (getattr(own, "__func__", own) is self.new or captures(self.target, self.new))
