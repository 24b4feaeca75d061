"""Reversible changes to a model, and the set of them that one binding holds.

A bound module becomes an instance of a subclass of its own class, whose ``forward`` calls the kernel. The subclass
belongs to one binding. So ``self`` is always the module that runs: a shallow copy, a ``DataParallel`` replica or a copy
that PEFT makes runs its own weights, and undoing the binding takes the kernel out of every copy at once.
"""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from types import FunctionType, MethodType
from typing import Any, Protocol

from torch import nn

from veomni_core.errors import BoundModelPickleError, SiteChangedError

logger = logging.getLogger(__name__)

_MADE_BY = "_veomni_bound_by"
_EAGER = "_veomni_eager_class"
_HOOKS = "its hooks"  # stands among guarded names for what the methods below add
_HOOKING = (
    "register_forward_hook",
    "register_forward_pre_hook",
    "register_full_backward_hook",
    "register_full_backward_pre_hook",
)


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
        duplicate = AttributeChange(copy.deepcopy(self.target, memo), self.name, copy.deepcopy(self.value, memo))
        duplicate._before = copy.deepcopy(self._before, memo)
        return duplicate


class ForwardChange:
    """Gives one module another ``forward``, a function of ``(self, ...)``, by giving it a subclass of its class.

    ``guarded`` names the module's attributes on which the proof of the site rests. Setting one of them later raises
    :class:`SiteChangedError`, or puts the module back to its own code, as the config's ``on_change`` says.
    """

    def __init__(self, module: nn.Module, forward: Callable[..., Any], guarded: Iterable[str] = ()) -> None:
        self._target = weakref.ref(module)
        self.forward, self.guarded = forward, frozenset(guarded)
        self.classes = BoundClasses()
        self._before: type[nn.Module] = type(module)
        self._bound: type[nn.Module] | None = None

    @property
    def target(self) -> Any:
        """The module, or ``None`` once it is freed."""
        return self._target()

    def apply(self) -> None:
        module = self.target
        self._before = type(module)
        self._bound = self.classes.of(self._before, self.forward, self.guarded)
        module.__class__ = self._bound

    @property
    def place(self) -> Hashable:
        return (id(self.target), "forward")

    def overridden(self) -> str:
        module = self.target
        if module is None or self._bound is None:
            return ""
        if not isinstance(module, self._bound):
            return f"its class became {type(module).__name__}"
        return "it was given a forward of its own" if "forward" in vars(module) else ""

    def revert(self) -> None:
        module = self.target
        if module is not None and type(module) is self._bound:
            module.__class__ = self._before

    def _duplicate(self, memo: dict[int, Any]) -> ForwardChange:
        return ForwardChange(copy.deepcopy(self.target, memo), self.forward, self.guarded)

    def __deepcopy__(self, memo: dict[int, Any]) -> ForwardChange:
        duplicate = self._duplicate(memo)
        duplicate.classes = copy.deepcopy(self.classes, memo)
        duplicate._before = duplicate.classes.copied.get(self._before, self._before)
        if self._bound is not None:
            duplicate._bound = duplicate.classes.of(duplicate._before, self.forward, self.guarded)
            duplicate.classes.copied[self._bound] = duplicate._bound
        return duplicate


class GuardChange(ForwardChange):
    """Guards attributes of a child of a bound module that the kernel runs in the place of: an activation.

    The child keeps its own code, which nothing calls. Changing one of its ``guarded`` attributes, or hooking it, is a
    change of the module ``owner``, whose proof rests on it.
    """

    def __init__(self, owner: nn.Module, name: str, child: nn.Module, guarded: Iterable[str] = ()) -> None:
        super().__init__(child, type(child).forward, {*guarded, "forward", _HOOKS})
        self.name = name
        self._owner = weakref.ref(owner)

    def _owner_module(self) -> Any:
        return self._owner()

    def apply(self) -> None:
        child, owner = self.target, self._owner_module()
        self.classes.paths[child] = f"{self.classes.paths.get(owner, type(owner).__name__)}.{self.name}"
        self.classes.owners.setdefault(child, weakref.WeakSet()).add(owner)
        if made_by(child) is not self.classes:  # a child that several modules share is guarded once
            super().apply()

    @property
    def place(self) -> Hashable:
        return (id(self.target), "guard")

    def overridden(self) -> str:
        return ""

    def _duplicate(self, memo: dict[int, Any]) -> GuardChange:
        owner, child = copy.deepcopy(self._owner_module(), memo), copy.deepcopy(self.target, memo)
        return GuardChange(owner, self.name, child, self.guarded)


class BoundClasses:
    """The subclasses that one binding made; modules that are bound alike share one.

    Regional ``torch.compile`` relies on that: it compiles one layer's code for all layers of equal types.
    ``changed`` lists, by module path, what was changed after bind so that a site runs its own code again.
    """

    def __init__(self, on_change: str = "raise") -> None:
        self.on_change = on_change
        self.paths: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self.owners: weakref.WeakKeyDictionary[nn.Module, weakref.WeakSet[nn.Module]] = weakref.WeakKeyDictionary()
        self.changed: dict[str, str] = {}
        self.copied: dict[type[nn.Module], type[nn.Module]] = {}
        self._made: dict[Hashable, type[nn.Module]] = {}

    def of(self, eager: type[nn.Module], forward: Callable[..., Any], guarded: frozenset[str]) -> type[nn.Module]:
        """The subclass of ``eager`` with this ``forward``; equal code over equal values gives the same one."""
        key = (eager, _identity(forward), guarded)
        if key not in self._made:
            self._made[key] = _subclass(eager, forward, guarded, self)
        return self._made[key]

    def note(self, path: str, what: str, when: str = "from now on") -> None:
        """Record, and say once, that the site at ``path`` runs its own code since ``what``."""
        if path not in self.changed:
            self.changed[path] = what
            logger.warning("%s runs its own code %s: %s", path, when, what)

    def set_on(self, module: nn.Module, name: str) -> None:
        """Called before the guarded attribute ``name`` of ``module`` changes; raises where the config says so."""
        path = self.paths.get(module, f"a copy of a bound {type(module).__name__}")
        what = f"{name} was changed after bind, and the proof of this site rests on it"
        if self.on_change == "raise":
            raise SiteChangedError(
                f"{path}: {what}. Call binding_of(model).undo() first and bind again after the change, or write "
                "`on_change: eager` under ops_implementation to let the module run its own code from then on"
            )
        owners = self.owners.get(module)
        if owners is None:
            self.note(path, what)
            _run_eager(module)
            return
        for owner in owners:
            self.note(self.paths.get(owner, "a bound module"), f"{path}: {what}")
            if made_by(owner) is self:
                _run_eager(owner)

    def retire(self) -> None:
        """Take the kernels out of every class that was made, and so out of every copy of a bound module."""
        for bound in self._made.values():
            for name in ("forward", "__setattr__", "__delattr__", *_HOOKING):
                if name in vars(bound):
                    delattr(bound, name)
            setattr(bound, _MADE_BY, None)

    def __deepcopy__(self, memo: dict[int, Any]) -> BoundClasses:
        duplicate = BoundClasses(self.on_change)
        memo[id(self)] = duplicate
        duplicate.changed = dict(self.changed)
        for module, path in self.paths.items():
            duplicate.paths[copy.deepcopy(module, memo)] = path
        for child, owners in self.owners.items():
            duplicate.owners[copy.deepcopy(child, memo)] = weakref.WeakSet(copy.deepcopy(each, memo) for each in owners)
        return duplicate


class ChangeSet:
    """Changes that are made, and taken back, together."""

    def __init__(self, on_change: str = "raise") -> None:
        self.classes = BoundClasses(on_change)
        self._changes: list[Change] = []

    def __iter__(self) -> Iterator[Change]:
        return iter(self._changes)

    def apply(self, change: Change, path: str = "") -> None:
        """Make one more change, at the module path ``path``."""
        if isinstance(change, ForwardChange):
            change.classes = self.classes
            self.classes.paths[change.target] = path or "the model"
        change.apply()
        self._changes.append(change)

    def changed(self) -> Iterator[tuple[str, str]]:
        """The module path of every site that runs its own code again, or somebody else's, and why."""
        yield from self.classes.changed.items()
        outermost = {change.place: change for change in self._changes}.values()
        for change in outermost:
            if isinstance(change, ForwardChange) and (what := change.overridden()):
                path = self.classes.paths[change.target]
                if path not in self.classes.changed:
                    yield path, what

    def revert(self) -> None:
        """Take every change back, the last one first."""
        while self._changes:
            self._changes.pop().revert()
        self.classes.retire()

    def __deepcopy__(self, memo: dict[int, Any]) -> ChangeSet:
        duplicate = ChangeSet()
        memo[id(self)] = duplicate
        duplicate.classes = copy.deepcopy(self.classes, memo)
        duplicate._changes = [copy.deepcopy(change, memo) for change in self._changes]
        for change in duplicate:  # the copied modules still are instances of the classes that this set made
            if isinstance(change, ForwardChange):
                module = change.target
                module.__class__ = duplicate.classes.copied.get(type(module), type(module))
        return duplicate


def made_by(module: nn.Module) -> BoundClasses | None:
    """The binding's classes that ``module`` is an instance of, or ``None`` for a module that runs its own code."""
    return getattr(type(module), _MADE_BY, None)


def eager_class(kind: type[nn.Module]) -> type[nn.Module]:
    """The class beneath the subclasses that bindings made."""
    while _EAGER in vars(kind):
        kind = vars(kind)[_EAGER]
    return kind


def _run_eager(module: nn.Module) -> None:
    bound = next(kind for kind in type(module).__mro__ if _EAGER in vars(kind))
    eager = vars(bound)[_EAGER]
    if type(module) is bound:
        module.__class__ = eager
    else:  # FSDP2 or a parametrization has put a subclass of its own over ours
        vars(module)["forward"] = MethodType(eager.forward, module)


def _subclass(
    eager: type[nn.Module], forward: Callable[..., Any], guarded: frozenset[str], classes: BoundClasses
) -> type[nn.Module]:
    def __reduce_ex__(self: nn.Module, protocol: Any) -> Any:
        if getattr(type(self), _MADE_BY) is not None:
            raise BoundModelPickleError(NO_PICKLE)
        reduced = super(bound, self).__reduce_ex__(protocol)
        return tuple(
            tuple(eager if each is type(self) else each for each in part) if isinstance(part, tuple) else part
            for part in reduced
        )

    namespace: dict[str, Any] = {
        "forward": forward,
        "__module__": eager.__module__,
        "__qualname__": eager.__qualname__,
        "__doc__": eager.__doc__,
        "__reduce_ex__": __reduce_ex__,
        "__copy__": _shallow_copy,
        "__deepcopy__": _deep_copy,
        _MADE_BY: classes,
        _EAGER: eager,
    }
    if guarded:

        def __setattr__(self: nn.Module, name: str, value: Any) -> None:
            if name in guarded:
                classes.set_on(self, name)
            eager.__setattr__(self, name, value)  # set_on may have taken the class away

        def __delattr__(self: nn.Module, name: str) -> None:
            if name in guarded:
                classes.set_on(self, name)
            eager.__delattr__(self, name)

        namespace |= {"__setattr__": __setattr__, "__delattr__": __delattr__}
    if _HOOKS in guarded:
        namespace |= {name: _guarded_method(eager, name, classes) for name in _HOOKING}
    # By the metaclass, as a class statement does.
    bound: Any = type(eager)(eager.__name__, (eager,), namespace)  # type: ignore[misc]
    return bound  # type: ignore[no-any-return]


def _guarded_method(eager: type[nn.Module], name: str, classes: BoundClasses) -> Callable[..., Any]:
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        classes.set_on(self, _HOOKS)
        return getattr(eager, name)(self, *args, **kwargs)

    return method


NO_PICKLE = (
    "a bound model can't be pickled: its kernels would silently be lost. Save model.state_dict() or "
    "model.save_pretrained(), or call binding_of(model).undo() first; after loading, bind again"
)


def _shallow_copy(self: nn.Module) -> nn.Module:
    duplicate: Any = type(self).__new__(type(self))
    duplicate.__setstate__(dict(vars(self)))
    return duplicate  # type: ignore[no-any-return]


def _deep_copy(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
    if (own := getattr(eager_class(type(self)), "__deepcopy__", None)) is not None:
        return own(self, memo)  # type: ignore[no-any-return]
    duplicate: Any = type(self).__new__(type(self))
    memo[id(self)] = duplicate
    duplicate.__setstate__(copy.deepcopy(dict(vars(self)), memo))
    return duplicate  # type: ignore[no-any-return]


def _identity(function: Callable[..., Any]) -> Hashable:
    """Equal for functions that do the same: one code over the same objects."""
    if not isinstance(function, FunctionType):
        return id(function)
    cells = tuple(_value(cell.cell_contents) for cell in function.__closure__ or ())
    return (function.__code__, id(function.__globals__), cells)


def _value(contents: Any) -> Hashable:
    plain = isinstance(contents, (bool, int, float, str, type(None)))
    if isinstance(contents, tuple):
        return tuple(_value(each) for each in contents)
    return (type(contents), contents) if plain else id(contents)
