"""Reversible changes to a model: an attribute of one object, and the ``forward`` of one module."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Protocol

from torch import nn

from veomni_core.bound_classes import BoundClasses
from veomni_core.bound_subclass import HOOKS, made_by
from veomni_core.errors import BindingError
from veomni_core.forward_functions import reaches, replace_captured, wraps


class Change(Protocol):
    """One reversible change to a model."""

    def apply(self) -> None:
        """Make the change."""

    def revert(self) -> None:
        """Restore what was there before :meth:`apply`; what somebody else has set since stays."""

    def overridden(self) -> str:
        """What somebody else has put in the place of this change, or an empty string."""

    @property
    def place(self) -> Hashable:
        """What is changed; a later change of the same place hides this one."""


class _Missing:
    """Marks an attribute that was not there; one object in every process and every copy."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Missing:
        return self


_MISSING = _Missing()


class AttributeChange:
    """Sets an attribute of one object, in the object's own ``__dict__``. The object is referenced weakly."""

    def __init__(self, target: Any, name: str, value: Any) -> None:
        self._target = weakref.ref(target)
        self.name, self.value = name, value
        self._before: Any = _MISSING

    @property
    def target(self) -> Any:
        """The object, or ``None`` once it is freed."""
        return self._target()

    def apply(self) -> None:
        self._before = vars(self.target).get(self.name, _MISSING)
        vars(self.target)[self.name] = self.value

    @property
    def place(self) -> Hashable:
        return (id(self.target), self.name)

    def overridden(self) -> str:
        target = self.target
        if target is None or vars(target).get(self.name) is self.value:
            return ""
        return f"{type(target).__name__}.{self.name} was replaced"

    def revert(self) -> None:
        target = self.target
        if target is None or self.overridden():
            return
        if self._before is _MISSING:
            vars(target).pop(self.name, None)
        else:
            vars(target)[self.name] = self._before

    def __deepcopy__(self, memo: dict[int, Any]) -> AttributeChange:
        target = self.target
        if target is None:
            return copy.copy(self)
        duplicate = AttributeChange(copy.deepcopy(target, memo), self.name, copy.deepcopy(self.value, memo))
        duplicate._before = copy.deepcopy(self._before, memo)
        return duplicate


class ClassChange:
    """Gives one module a subclass of its class with ``value`` as its ``name``; the base of what follows.

    ``guarded`` names the module's attributes on which the proof of the site rests. Setting one of them later raises
    :class:`~veomni_core.errors.SiteChangedError`, or puts the module back to its own code, as the config's
    ``on_change`` says.
    """

    def __init__(self, module: nn.Module, name: str, value: Any, guarded: Iterable[str] = ()) -> None:
        self._target = weakref.ref(module)
        self.name, self.value, self.guarded = name, value, frozenset(guarded)
        self.classes = BoundClasses()
        self._before: type[nn.Module] = type(module)
        self._bound: type[nn.Module] | None = None

    @property
    def target(self) -> Any:
        """The module, or ``None`` once it is freed."""
        return self._target()

    def apply(self) -> None:
        """Give the module its subclass.

        Raises:
            BindingError: Python can't give the module another class.
        """
        module = self.target
        self._before = type(module)
        self._bound = self.classes.of(self._before, self.name, self.value, self.guarded)
        try:
            module.__class__ = self._bound
        except TypeError as error:
            raise BindingError(f"{type(module).__name__} can't be given a subclass of its class: {error}") from error

    @property
    def place(self) -> Hashable:
        return (id(self.target), self.name)

    def overridden(self) -> str:
        module = self.target
        if module is None or self._bound is None or isinstance(module, self._bound):
            return ""
        return f"its class became {type(module).__name__}"

    def revert(self) -> None:
        module = self.target
        if module is not None and type(module) is self._bound:
            module.__class__ = self._before

    def __deepcopy__(self, memo: dict[int, Any]) -> ClassChange:
        duplicate = copy.copy(self)
        if self.target is None:
            return duplicate
        duplicate._target = weakref.ref(copy.deepcopy(self.target, memo))
        duplicate.classes = classes = copy.deepcopy(self.classes, memo)
        duplicate._before = classes.copied.get(self._before, self._before)
        duplicate._bound = classes.copied[self._bound] if self._bound else None
        return duplicate


class PropertyChange(ClassChange):
    """Makes one module give ``value`` as its attribute ``name``, whatever its instance holds there."""

    def __init__(self, module: nn.Module, name: str, value: Any) -> None:
        super().__init__(module, name, property(lambda self: value))


class ForwardChange(ClassChange):
    """Gives one module another ``forward``, a function of ``(self, ...)``.

    The function must reach the module by its ``self`` alone: one that closes over the module would run the original in
    every copy. ``calls`` names children that the function calls, where its code does not name them.
    """

    def __init__(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        guarded: Iterable[str] = (),
        calls: Iterable[str] = (),
    ) -> None:
        super().__init__(module, "forward", forward, guarded)
        self.forward, self.calls = forward, frozenset(calls)
        self.keeps_original = False  # whether the function calls what was there before

    def apply(self) -> None:
        """Give the module its subclass.

        Raises:
            BindingError: a ``forward`` was set on the module itself and would hide the class's, or Python can't give
                the module another class.
        """
        self.refuse_own_forward()
        module = self.target
        self.keeps_original = reaches(self.forward, type(module).forward)
        super().apply()

    def refuse_own_forward(self) -> None:
        """Raise ``BindingError`` where a ``forward`` was set on the module itself."""
        module = self.target
        if "forward" in vars(module):
            raise BindingError(
                f"{self.classes.paths.get(module, 'a module')} ({type(module).__name__}) has a forward of its own, "
                f"{setter_of(module)}: a kernel beneath it might not run. Take it off before bind, and put it on after"
            )

    def overridden(self) -> str:
        if what := super().overridden():
            return what
        module = self.target
        given = module is not None and "forward" in vars(module)
        if given and self._bound is not None and wraps(vars(module)["forward"], vars(self._bound)["forward"]):
            return ""
        return f"it was given a forward of its own, {setter_of(module)}" if given else ""

    def revert(self) -> None:
        module = self.target
        super().revert()
        if module is not None and self._bound is not None:
            # Not self.forward: modules that are bound alike share the class, and so the first one's function.
            replace_captured(module, vars(self._bound)["forward"], self._before.forward)


class GuardChange(ForwardChange):
    """Guards attributes of a child of a bound module that the kernel runs in the place of: an activation.

    The child keeps its own code, which nothing calls. Changing one of its ``guarded`` attributes, or hooking it, is a
    change of the module ``owner``, whose proof rests on it.
    """

    def __init__(self, owner: nn.Module, name: str, child: nn.Module, guarded: Iterable[str] = ()) -> None:
        super().__init__(child, type(child).forward, {*guarded, "forward", HOOKS})
        self.child_name = name
        self._owner = weakref.ref(owner)

    def apply(self) -> None:
        child, owner = self.target, self._owner()
        assert owner is not None, "a rule makes and applies its changes while the model lives"
        self.classes.paths[child] = f"{self.classes.paths.get(owner, type(owner).__name__)}.{self.child_name}"
        self.classes.owners.setdefault(child, weakref.WeakSet()).add(owner)
        if made_by(child) is not self.classes:  # a child that several modules share is guarded once
            super().apply()

    @property
    def place(self) -> Hashable:
        return (id(self.target), "guard")

    def __deepcopy__(self, memo: dict[int, Any]) -> ClassChange:
        duplicate: Any = super().__deepcopy__(memo)
        if (owner := self._owner()) is not None:
            duplicate._owner = weakref.ref(copy.deepcopy(owner, memo))
        return duplicate  # type: ignore[no-any-return]

    def overridden(self) -> str:
        """Nothing: what is set on the child is noted as a change of its owner."""
        return ""


def setter_of(module: nn.Module) -> str:
    """Who set the ``forward`` that stands in the module's own ``__dict__``, as far as that can be seen; else empty."""
    if "forward" not in vars(module):
        return ""
    if (hook := vars(module).get("_hf_hook")) is not None:
        return f"set by accelerate's {type(hook).__name__} (accelerate.hooks.remove_hook_from_module takes it off)"
    own = vars(module)["forward"]
    own = getattr(own, "func", own)  # what a functools.partial calls
    return f"set to {getattr(own, '__module__', None)}.{getattr(own, '__qualname__', type(own).__name__)}"
