"""Builds the subclass that a binding gives to a module: its copying, pickling and guarded attributes."""

from __future__ import annotations

import copy
import copyreg
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from veomni_core.errors import BoundModelPickleError

if TYPE_CHECKING:  # which makes these subclasses
    from veomni_core.changes.bound_classes import BoundClasses

# Class attributes of each subclass: the BoundClasses that made it (None after undo), and the original class beneath it.
MADE_BY = "_veomni_bound_by"
EAGER = "_veomni_eager_class"
# And the subclass itself, so that ``kind.SELF is kind`` is false for a class that other code derived from it.
SELF = "_veomni_bound_class"
_ABSENT = object()
_COPYING = (copy.copy.__code__, copy.deepcopy.__code__)
NO_PICKLE = (
    "a bound or otherwise transformed model can't be pickled: its kernels would silently be lost. Save "
    "model.state_dict() or model.save_pretrained(), or undo() its transformations first, the last one first "
    "(binding_of(model).undo() if it is only bound); after loading, apply them again"
)
HOOKS = "its hooks"  # a pseudo-name: if it is guarded, registering a hook counts as a change
_HOOKING = (
    "register_forward_hook",
    "register_forward_pre_hook",
    "register_full_backward_hook",
    "register_full_backward_pre_hook",
)


def made_by(module: nn.Module) -> BoundClasses | None:
    """The owner of the subclass that ``module`` is an instance of; ``None`` for a module that runs its own code."""
    return getattr(type(module), MADE_BY, None)


def is_bound_by(module: nn.Module, classes: BoundClasses) -> bool:
    """Whether ``module`` runs what ``classes`` put into it, also beneath another transformation's class."""
    for kind in type(module).__mro__:
        if MADE_BY in vars(kind) and vars(kind)[MADE_BY] in (None, classes):  # None: its own code was put back on top
            return vars(kind)[MADE_BY] is classes
    return False


def bindings_in(module: nn.Module) -> Iterator[BoundClasses]:
    """The owners of all subclasses in the MRO of ``module`` that belong to a binding, not to another transformation."""
    made = (vars(kind).get(MADE_BY) for kind in (type(module).__mro__ if hasattr(type(module), MADE_BY) else ()))
    yield from (classes for classes in made if classes is not None and classes.binding is not None)


def eager_class(kind: type[nn.Module]) -> type[nn.Module]:
    """The original class beneath the subclasses that bindings made."""
    while EAGER in vars(kind):
        kind = vars(kind)[EAGER]
    return kind


def bound_subclass(
    eager: type[nn.Module], name: str, value: Any, guarded: frozenset[str], classes: BoundClasses
) -> type[nn.Module]:
    """Make a subclass of ``eager``, with the same class name, whose attribute ``name`` is ``value``.

    Setting one of the ``guarded`` attributes on an instance calls ``classes.set_on`` first.
    """
    namespace: dict[str, Any] = {
        name: value,
        "__module__": eager.__module__,
        "__qualname__": eager.__qualname__,
        "__doc__": eager.__doc__,
        MADE_BY: classes,
        EAGER: eager,
        "__no_type_check__": True,  # transformers evaluates a model's annotations, which eager has, for each subclass
    }
    # Created through the metaclass, as a class statement would.
    bound: Any = type(eager)(eager.__name__, (eager,), namespace)  # type: ignore[misc]
    del bound.__no_type_check__
    setattr(bound, SELF, bound)
    bound.__new__ = staticmethod(_making(bound, eager))
    methods: list[Callable[..., Any]] = [__reduce_ex__]
    methods += _guarding(bound, guarded, classes) if guarded else ()
    methods += _guarding_hooks(bound, classes) if HOOKS in guarded else ()
    for method in methods:
        setattr(bound, method.__name__, method)
    return bound


def _making(bound: Any, eager: type[nn.Module]) -> Callable[..., Any]:
    """The ``__new__`` by which ``type(model)(config)`` makes a module that isn't bound; copies pass no arguments."""

    def __new__(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if (args or kwargs) and cls is bound:
            return eager(*args, **kwargs)
        make = super(bound, cls).__new__
        return make(cls) if make is object.__new__ else make(cls, *args, **kwargs)

    return __new__


def __reduce_ex__(self: nn.Module, protocol: Any) -> Any:
    """Copies a bound module, and refuses to pickle one: both call this.

    Methods named ``__copy__`` and ``__deepcopy__`` would be found through wrappers that pass attributes on, such as
    PEFT's models: a copy of the wrapper would be a copy of the module inside it.
    """
    copying = sys._getframe(1).f_code in _COPYING
    if made_by(self) is not None and not copying:
        raise BoundModelPickleError(NO_PICKLE)
    eager = eager_class(type(self))
    below = eager_class(next(kind for kind in type(self).__mro__ if EAGER in vars(kind)))
    reduced: Any = below.__reduce_ex__(self, protocol)
    make, arguments, *rest = reduced
    if make is not copyreg.__newobj__:  # type: ignore[attr-defined]
        return (make, tuple(eager if each is type(self) and not copying else each for each in arguments), *rest)
    if copying:
        return (partial(_copy_of, self), (), *rest)
    # With copyreg.__newobj__, pickle requires the class to be the object's own; _new does not have that check.
    return (_new, tuple(eager if each is type(self) else each for each in arguments), *rest)


def _guarding(bound: Any, guarded: frozenset[str], classes: BoundClasses) -> Iterator[Callable[..., Any]]:
    def __setattr__(self: nn.Module, name: str, value: Any) -> None:
        if name in guarded and _changes(self, name, value):
            classes.set_on(self, name)
            return setattr(self, name, value)
        super(bound, self).__setattr__(name, value)

    def __delattr__(self: nn.Module, name: str) -> None:
        if name in guarded and _changes(self, name, _ABSENT):
            classes.set_on(self, name)
            return delattr(self, name)
        super(bound, self).__delattr__(name)

    yield from (__setattr__, __delattr__)


def _guarding_hooks(bound: Any, classes: BoundClasses) -> Iterator[Callable[..., Any]]:
    def guarded_method(name: str) -> Callable[..., Any]:
        def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if made_by(self) is not None:
                classes.set_on(self, HOOKS)
                return getattr(self, name)(*args, **kwargs)
            return getattr(super(bound, self), name)(*args, **kwargs)

        method.__name__ = name
        return method

    yield from map(guarded_method, _HOOKING)


def _changes(module: nn.Module, name: str, value: Any) -> bool:
    """Whether setting ``name`` to ``value`` changes what ``module`` computes.

    ``DataParallel`` replicas are exempt: torch sets their children to copies of the originals.
    """
    if made_by(module) is None or vars(module).get("_is_replica", False):
        return False
    present = getattr(module, name, _ABSENT)
    plain = isinstance(value, (bool, int, float, str)) and type(value) is type(present)
    return not (value == present if plain else value is present)


def _copy_of(module: nn.Module) -> Any:
    """An empty instance of the module's class, registered so that undoing the binding reaches it."""
    kind: Any = type(module)
    duplicate = kind.__new__(kind)
    if (classes := made_by(module)) is not None:
        classes.copies.add(duplicate)
    return duplicate


def _new(kind: Any, *arguments: Any) -> Any:
    return kind.__new__(kind, *arguments)
