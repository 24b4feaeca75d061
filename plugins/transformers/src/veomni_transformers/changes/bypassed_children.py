"""Runs a module's own code while a child that the kernel computes itself is not the one that was proven.

A guard of attributes does not see a child that is put into ``_modules``, or into the module's ``__dict__``, where it
hides the one in ``_modules``; nor a hook that is put into the child's dictionaries, or hooks of all modules of the
process. So a bound forward looks at each such child before its kernel. Some code makes such a module at each call, and
keeps it nowhere: hooks of all modules alone reach that one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn
from torch.nn.modules.module import (
    _global_backward_hooks,
    _global_backward_pre_hooks,
    _global_forward_hooks,
    _global_forward_pre_hooks,
)

from veomni_core.changes.bound_subclass import MADE_BY, SELF, made_by

# The attribute of a bound module that has these children by name. It is copied along, and names the copy's children.
BYPASSED = "_veomni_bypassed"
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
Function = Callable[..., Any]


def with_children_as_proven(bound: Any, own: Function, names: Collection[str]) -> Function:
    """``bound``, a function of ``self`` and tensors, which runs ``own`` while one of the children is another.

    A module without such children pays nothing, and one with a child a fraction of a microsecond.

    Args:
        bound: the forward that calls the kernel; its arguments besides ``self`` are passed by position.
        own: the module's own forward.
        names: of the children that the kernel computes itself.
    """
    if not names:
        return bound  # type: ignore[no-any-return]
    runs_as_proven = _one_child(*names) if len(names) == 1 else _children(tuple(names))
    return _ARITIES[bound.__code__.co_argcount - 2](bound, own, runs_as_proven)


def why_not_as_proven(module: nn.Module, name: str) -> str:
    """What is another about the child ``name`` since bind; empty if nothing is."""
    child, proven = getattr(module, name, None), vars(module).get(BYPASSED, {}).get(name)  # as its own code finds it
    if proven is None or made_by(module) is None:
        return ""
    if child is None or (child is not proven and not vars(module).get("_is_replica", False)):
        return f"{name} was replaced after bind"
    if getattr(child, MADE_BY, None) is None or getattr(child, SELF, None) is not type(child):
        return f"the class of {name} was changed after bind"
    if "forward" in vars(child):
        return f"{name} was given a forward of its own after bind"
    if any(vars(child)[hooks] for hooks in _HOOKS):
        return f"{name} has hooks, which the kernel in its place would not call"
    return _why_hooked(name) if hooks_of_all() else ""


def hooks_of_all() -> bool:
    """Whether a hook is registered for all modules of the process."""
    return bool(
        _global_forward_hooks or _global_forward_pre_hooks or _global_backward_hooks or _global_backward_pre_hooks
    )


class MadeModules:
    """Says in the receipt that a site runs its own code while there are hooks of all modules. It changes nothing.

    It is for own code that makes a module at each call. It stands beside the change of the forward, and not in it: that
    one says nothing where another rule has put a forward on top.
    """

    around_forward = True

    def apply(self) -> None:
        """Nothing: the new forward looks by :func:`hooks_of_all`."""

    revert = apply

    @property
    def place(self) -> Hashable:
        return id(self)

    def suspended(self) -> AbstractContextManager[None]:
        return nullcontext()

    def overridden(self) -> str:
        return _why_hooked("a module made at each call") if hooks_of_all() else ""


def _why_hooked(name: str) -> str:
    return f"there are hooks of all modules, which the kernel in the place of {name} would not call"


def _one_child(name: str) -> Function:
    def as_proven(module: Any) -> bool:
        child = module._modules.get(name)
        return (
            child is module._veomni_bypassed[name]
            and name not in module.__dict__
            and getattr(child, MADE_BY, None) is not None
            and child._veomni_bound_class is type(child)
            and "forward" not in child.__dict__
            and not (
                child._forward_hooks
                or child._forward_pre_hooks
                or child._backward_hooks
                or child._backward_pre_hooks
                or _global_forward_hooks
                or _global_forward_pre_hooks
                or _global_backward_hooks
                or _global_backward_pre_hooks
            )
        )

    return as_proven


def _children(names: tuple[str, ...]) -> Function:
    each_of_them = [_one_child(name) for name in names]
    return lambda module: all(as_proven(module) for as_proven in each_of_them)


def _run(bound: Function, own: Function, module: Any, *tensors: Any) -> Any:
    """What a call runs that is not certainly as proven: the kernel in a replica, whose children are copies."""
    whys = (why_not_as_proven(module, name) for name in vars(module).get(BYPASSED, {}))
    why = next(filter(None, whys), "")
    classes = made_by(module)
    if not why and classes is not None:
        return bound(module, *tensors)
    if classes is not None:
        path = classes.paths.get(module, f"a copy of a bound {type(module).__name__}")
        classes.note(path, why, "for as long as that is so")
    return own(module, *tensors)


def _of_one(bound: Function, own: Function, as_proven: Function) -> Function:
    def forward(self: Any, first: Any) -> Any:
        return bound(self, first) if as_proven(self) else _run(bound, own, self, first)

    return forward


def _of_two(bound: Function, own: Function, as_proven: Function) -> Function:
    def forward(self: Any, first: Any, second: Any) -> Any:
        return bound(self, first, second) if as_proven(self) else _run(bound, own, self, first, second)

    return forward


def _of_three(bound: Function, own: Function, as_proven: Function) -> Function:
    def forward(self: Any, first: Any, second: Any, third: Any) -> Any:
        return bound(self, first, second, third) if as_proven(self) else _run(bound, own, self, first, second, third)

    return forward


# The bound forward's number of arguments is read from its code, so there is a function for each.
_ARITIES = (_of_one, _of_two, _of_three)
