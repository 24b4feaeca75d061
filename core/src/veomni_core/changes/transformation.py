"""What every transformation of a model can do: be applied, undone, copied, described, and listed on its model."""

from __future__ import annotations

import copy
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, Self

from torch import nn

from veomni_core.changes.bound_subclass import NO_PICKLE, bindings_in
from veomni_core.changes.change import Change
from veomni_core.changes.change_set import ChangeSet
from veomni_core.errors import BindingError, BoundModelPickleError

# The attribute in which a model lists its transformations, in the order applied: the last one is on top.
_APPLIED = "_veomni_transformations"


class Transformation(ABC):
    """Changes to one model that are in force together. Base of each kind of transformation, such as a binding.

    Used as a context manager, it calls :meth:`undo` on exit. It holds only a weak reference to the model and so does
    not keep it alive. A deep copy of the model is transformed too, by a transformation of its own: the changes are
    copied. All other attributes are shared with the copy, so a subclass keeps nothing there that belongs to one model.

    Attributes:
        name: what receipts and messages call this kind of transformation.
    """

    name: ClassVar[str]

    def __init__(self, model: nn.Module, changes: ChangeSet | None = None) -> None:
        self._model = weakref.ref(model)
        self._changes = changes or ChangeSet()

    @property
    def model(self) -> nn.Module:
        """The transformed model.

        Raises:
            BindingError: the model was freed.
        """
        model = self._model()
        if model is None:
            raise BindingError(f"the model of this {self.name} was freed")
        return model

    @property
    def active(self) -> bool:
        """Whether this transformation is in force in its model now."""
        model = self._model()
        return model is not None and any(each is self for each in vars(model).get(_APPLIED, ()))

    @abstractmethod
    def describe(self) -> str:
        """What it does to the model, for receipts and messages."""

    def changed(self) -> dict[str, str]:
        """By module path, how other code has overridden this transformation's changes since.

        What a transformation on top of this one has changed again is left out: undoing that restores it.
        """
        above = {change.place for each in self._above() for change in each._changes}
        return dict(self._changes.changed(self._model(), above))

    def apply(self, changes: Iterable[tuple[str, str, Change]]) -> None:
        """Make ``changes``, each with its module path and its owner, on top of what is in force in the model.

        Each change is made before the next one is taken. If one fails, all of them are reverted.

        Raises:
            BindingError: a change is refused, or would hide another one.
        """
        for module in _reached_from(self.model):
            vars(module)[_APPLIED] = (*vars(module).get(_APPLIED, ()), self)
        try:
            for path, owner, change in changes:
                self._changes.apply(change, path, owner)
            self._changes.refuse_hidden()
        except BaseException:
            self._revert()
            raise

    def undo(self) -> None:
        """Restore the model as it was before. Attributes that other code has set since are kept.

        Raises:
            BindingError: this transformation is already undone, its model was freed, or another one is on top of it.
        """
        if not self.active:
            raise BindingError(f"this {self.name} is not in force: it is already undone, or its model was freed")
        if above := self._above():
            raise BindingError(
                f"{above[-1].name} ({above[-1].describe()}) was applied on top of this {self.name}: undo() that first"
            )
        self.changed()  # logs what other code has set since, which is kept
        self._revert()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.active:
            self.undo()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        duplicate = memo[id(self)] = object.__new__(type(self))
        vars(duplicate).update(vars(self))
        if (model := self._model()) is not None:
            duplicate._model = weakref.ref(copy.deepcopy(model, memo))
        duplicate._changes = copy.deepcopy(self._changes, memo)
        return duplicate

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise BoundModelPickleError(NO_PICKLE)

    def _above(self) -> tuple[Transformation, ...]:
        """The transformations that were applied after this one, and are in force."""
        model = self._model()
        applied = () if model is None or not self.active else transformations_of(model)
        return applied[applied.index(self) + 1 :] if applied else ()

    def _revert(self) -> None:
        reached = _reached_from(self.model)
        self._changes.revert()
        for module in reached:
            remaining = tuple(each for each in vars(module).pop(_APPLIED, ()) if each is not self)
            if remaining:
                vars(module)[_APPLIED] = remaining


def transformations_of(model: nn.Module) -> tuple[Transformation, ...]:
    """The transformations that are in force in ``model``, in the order applied.

    They include those that were applied later to a model around ``model``, and, if ``model`` is bound, to its parts.
    """
    return tuple(each for each in vars(model).get(_APPLIED, ()) if each.active)


def transformations_reaching(model: nn.Module) -> Iterator[Transformation]:
    """Every transformation that is in force in ``model``, in a part of it, or in a bound model that it is a part of."""
    yield from dict.fromkeys(each for module in _reached_from(model) for each in transformations_of(module))


def _reached_from(model: nn.Module) -> Iterable[nn.Module]:
    """``model``, its transformed parts, and the models whose bindings put kernels into it.

    A new transformation is listed on each of them. So what was applied to a part is not undone beneath what was applied
    to the whole, nor the other way round.
    """
    found = {model: None}
    for module in model.modules():
        if _APPLIED in vars(module):
            found[module] = None
        found |= {classes.binding.model: None for classes in bindings_in(module) if classes.binding.active}
    return found
