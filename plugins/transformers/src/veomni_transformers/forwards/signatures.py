"""Gives a bound forward the signature of the module's own. Calls that no proof covers run the module's own code."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

from torch import nn

from veomni_core.changes.bound_subclass import made_by

Function = Callable[..., Any]
_KINDS = inspect.Parameter
_BY_NAME_OR_PLACE = (_KINDS.POSITIONAL_OR_KEYWORD, _KINDS.POSITIONAL_ONLY)


def why_not_callable(module: nn.Module, proven: int) -> str:
    """Why the forward of the module's class can't be called with ``proven`` tensors, or an empty string."""
    parameters = _parameters(module)
    required = [each.name for each in parameters if _is_required(each)]
    leading = parameters[:proven]
    if len(leading) < proven or any(each.kind not in _BY_NAME_OR_PLACE for each in leading):
        return f"its forward takes {', '.join(each.name for each in parameters) or 'nothing'}, not {proven} tensors"
    further = [name for name in required if name not in [each.name for each in leading]]
    return f"its forward also requires {', '.join(further)}" if further else ""


def leading_parameters(module: nn.Module, most: int) -> list[str]:
    """The names of the first arguments that can be passed by position, at most ``most`` of them."""
    return [each.name for each in _parameters(module) if each.kind in _BY_NAME_OR_PLACE][:most]


def with_own_signature(module: nn.Module, bound: FunctionType) -> Function:
    """Wrap ``bound``, a function of ``self`` and tensors, so that it is called like the forward of the module's class.

    The arguments get the names that they have in the module's own forward. A proof does not cover that forward's
    optional arguments: a call that sets one runs the module's own code, and the receipt says so. So does a call without
    the second tensor, where that may be left out. A forward without optional arguments needs no such check, so its
    calls cost nothing more.
    """
    own, proven = type(module).forward, bound.__code__.co_argcount - 1
    parameters = _parameters(module)
    first = parameters[:proven]
    further = {each.name: each.default for each in parameters[proven:]}
    if proven == 2 and not _is_required(first[1]):
        bound = _unless_left_out(bound, own, first[1])
    if not further:
        return _renamed(bound, first, own)
    return _renamed(_ARITIES[proven - 1](bound, own, further), first, own)


def _unless_left_out(bound: Function, own: Function, second_parameter: inspect.Parameter) -> Any:
    name, default = second_parameter.name, second_parameter.default

    def forward(self: nn.Module, first: Any, second: Any) -> Any:
        return _run_own(own, self, first, **{name: second}) if second is default else bound(self, first, second)

    return forward


def _of_one(bound: Function, own: Function, further: dict[str, Any]) -> Any:
    def forward(self: nn.Module, first: Any, *args: Any, **kwargs: Any) -> Any:
        if args or (kwargs and _sets_any(kwargs, further)):
            return _run_own(own, self, first, *args, **kwargs)
        return bound(self, first)

    return forward


def _of_two(bound: Function, own: Function, further: dict[str, Any]) -> Any:
    def forward(self: nn.Module, first: Any, second: Any, *args: Any, **kwargs: Any) -> Any:
        if args or (kwargs and _sets_any(kwargs, further)):
            return _run_own(own, self, first, second, *args, **kwargs)
        return bound(self, first, second)

    return forward


def _of_three(bound: Function, own: Function, further: dict[str, Any]) -> Any:
    def forward(self: nn.Module, first: Any, second: Any, third: Any, *args: Any, **kwargs: Any) -> Any:
        if args or (kwargs and _sets_any(kwargs, further)):
            return _run_own(own, self, first, second, third, *args, **kwargs)
        return bound(self, first, second, third)

    return forward


_ARITIES = (_of_one, _of_two, _of_three)


def _sets_any(kwargs: dict[str, Any], further: dict[str, Any]) -> bool:
    """Whether a call passes an argument that differs from its default in the module's own forward."""
    return any(value is not further.get(name, _KINDS.empty) for name, value in kwargs.items())


def _run_own(own: Function, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if (classes := made_by(module)) is not None:
        path = classes.paths.get(module, f"a copy of a bound {type(module).__name__}")
        given = ", ".join(f"{name}=None" if value is None else name for name, value in kwargs.items())
        given = given or "further positional arguments"
        classes.note(path, f"it was called with {given}, which its proof does not cover", "in such calls")
    return own(module, *args, **kwargs)


def _renamed(function: FunctionType, parameters: list[inspect.Parameter], own: Function) -> FunctionType:
    """``function`` with the names and the defaults of ``parameters``, which are the first ones of ``own``."""
    code = function.__code__
    first, *others = code.co_varnames
    others[: len(parameters)] = [each.name for each in parameters]
    renamed = FunctionType(
        code.replace(co_varnames=(first, *others)),
        function.__globals__,
        function.__name__,
        None,
        function.__closure__,
    )
    defaults = tuple(each.default for each in parameters if each.default is not _KINDS.empty)
    renamed.__defaults__ = defaults or None
    renamed.__annotations__, renamed.__doc__ = dict(getattr(own, "__annotations__", {})), own.__doc__
    return renamed


def _parameters(module: nn.Module) -> list[inspect.Parameter]:
    return list(inspect.signature(type(module).forward).parameters.values())[1:]


def _is_required(parameter: inspect.Parameter) -> bool:
    return parameter.default is _KINDS.empty and parameter.kind not in (_KINDS.VAR_POSITIONAL, _KINDS.VAR_KEYWORD)
