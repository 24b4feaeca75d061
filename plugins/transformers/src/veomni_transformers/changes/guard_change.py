"""The change that guards a child of a bound module, which the kernel computes in the child's place."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Hashable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from veomni_core.changes.bound_subclass import HOOKS, made_by
from veomni_core.changes.change import ClassChange, ForwardChange
from veomni_transformers.changes.bypassed_children import BYPASSED, why_not_as_proven


class GuardChange(ForwardChange):
    """Guards a child of a bound module that the kernel computes itself, such as an activation.

    The child keeps its own code, but nothing calls it. Setting one of its ``guarded`` attributes, or registering a hook
    on it, counts as a change of the bound module ``owner``, whose proof depends on the child. What reaches the child in
    other ways is seen by the owner's forward (:mod:`~veomni_transformers.changes.bypassed_children`).
    """

    def __init__(self, owner: nn.Module, name: str, child: nn.Module, guarded: Iterable[str] = ()) -> None:
        super().__init__(child, type(child).forward, {*guarded, "forward", HOOKS})
        self.child_name = name
        self._owner = weakref.ref(owner)

    def apply(self) -> None:
        child, owner = self.target, self._owner()
        assert owner is not None, "a rule makes and applies its changes while the model is alive"
        self.classes.paths[child] = f"{self.classes.paths.get(owner, type(owner).__name__)}.{self.child_name}"
        self.classes.owners.setdefault(child, weakref.WeakSet()).add(owner)
        vars(owner)[BYPASSED] = {**vars(owner).get(BYPASSED, {}), self.child_name: child}
        if made_by(child) is not self.classes:  # a child that several modules share is guarded once
            super().apply()

    @property
    def place(self) -> Hashable:
        return (id(self.target), "guard")

    def __deepcopy__(self, memo: dict[int, Any]) -> ClassChange:
        duplicate: Any = super().__deepcopy__(memo)
        if (owner := self._owner()) is not None:
            duplicate._owner = weakref.ref(copy.deepcopy(owner, memo))
        return duplicate

    def suspended(self) -> AbstractContextManager[None]:
        """A no-op: the child has its own code, and who calls it is the owner's change."""
        return nullcontext()

    def overridden(self) -> str:
        """What the owner's forward sees; what is set on the child is recorded as a change of its owner."""
        owner = self._owner()
        return "" if owner is None else why_not_as_proven(owner, self.child_name)

    def revert(self) -> None:
        super().revert()
        if (owner := self._owner()) is not None:
            vars(owner).pop(BYPASSED, None)
