"""Inspects ``forward`` functions: which ones are equivalent, what they call, which modules they keep alive."""

from __future__ import annotations

import dis
from collections.abc import Callable, Hashable, Iterator
from functools import lru_cache, partial
from itertools import pairwise
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

from torch import nn

Function = Callable[..., Any]
# How deep closures within closures are followed: decorators around a method, and a wrapper or two around them.
_DEEPEST = 6


def equivalence(function: Function) -> Hashable:
    """A key that is equal for functions with the same code over the same objects and equal plain values.

    Objects enter the key by their ``id``, so it is valid only while the function is alive.
    """
    return _equivalence(function, 0)


def reaches(function: Function, other: Function) -> bool:
    """Whether ``function`` runs the code of ``other``: it closes over it, or is a clone of it with other globals."""
    code = getattr(other, "__code__", None)
    # A clone has a code object that is equal but not identical; closures of one definition share a code object.
    return any(layer is other or (layer.__code__ == code and layer.__code__ is not code) for layer in layers(function))


def wraps(function: Function, other: Function) -> bool:
    """Whether ``function`` decorates ``other``, going by ``__wrapped__`` as ``functools.wraps`` sets it.

    accelerate's autocast wrapper is an example. A ``functools.partial`` counts only if it is ``other`` itself: it calls
    its own ``func``, whatever its ``__wrapped__`` says.
    """
    current: Any = function
    for _ in range(_DEEPEST):
        current = getattr(current, "__func__", current)
        if current is other or isinstance(current, partial):
            return current is other
        current = getattr(current, "__wrapped__", None)
    return False


def names_in(function: Function) -> set[str]:
    """All attribute names and string constants in ``function`` and in the functions that it closes over."""
    names: set[str] = set()
    for layer in layers(function):
        for code in _codes(layer.__code__):
            names.update(code.co_names, *(_strings(constant) for constant in code.co_consts))
        for cell in layer.__closure__ or ():
            names.update(_strings(contents_of(cell)))
    return names


def only_reads(function: Function, name: str) -> bool:
    """Whether ``function`` names the attribute ``name`` only to read attributes of it: ``self.norm.weight``."""
    codes = (code for layer in layers(function) for code in _codes(layer.__code__))
    pairs = (pair for code in codes for pair in pairwise(dis.get_instructions(code)))
    uses = [(after.opname, after.argval) for one, after in pairs if one.argval == name]
    return bool(uses) and all(op == "LOAD_ATTR" and read not in ("forward", "__call__") for op, read in uses)


def modules_held(function: Function) -> Iterator[nn.Module]:
    """The modules that ``function`` references: in its closure, as ``__self__``, or as a default argument."""
    yield from (value for value in _held(function, 0) if isinstance(value, nn.Module))


def captures(module: nn.Module, function: Function) -> bool:
    """Whether the ``forward`` in the module's own ``__dict__`` captured ``function``, as one that it may call."""
    found: list[Any] = []

    def noted(value: Any) -> Any:
        found.extend([value] if _is_method(value, function, module) else [])
        return value

    _replace_within(vars(module)["forward"], noted, 0, [])
    return bool(found)


def replace_captured(module: nn.Module, old: Function, new: Function) -> list[Callable[[], None]]:
    """Make wrappers around the module's ``forward`` that captured ``old`` call ``new`` instead.

    accelerate's hooks and mixed precision keep the old method, or its function, on the module or in a closure.

    Returns:
        What puts each of them back. Replacing ``new`` by ``old`` is not the same where ``old`` itself calls ``new``: it
        would then call itself.
    """
    undo: list[Callable[[], None]] = []
    if "forward" not in vars(module):
        return undo

    def renewed(value: Any) -> Any:
        if value is old:
            return new
        return MethodType(new, module) if _is_method(value, old, module) else value

    for name, value in list(vars(module).items()):
        if (fresh := renewed(value)) is not value:
            vars(module)[name] = fresh
            undo.append(partial(vars(module).__setitem__, name, value))
    _replace_within(vars(module)["forward"], renewed, 0, undo)
    return undo


def _is_method(value: Any, function: Function, module: nn.Module) -> bool:
    """Whether ``value`` is ``function``, or the method that it makes of ``module``."""
    bound = isinstance(value, MethodType) and value.__func__ is function and value.__self__ is module
    return bound or value is function


def _replace_within(value: Any, renewed: Function, depth: int, undo: list[Callable[[], None]]) -> None:
    """Apply ``renewed`` to every closure cell and callable attribute that ``value`` may call through.

    What puts back a former content is added to ``undo``.
    """
    value = getattr(value, "__func__", value)
    value = value.func if isinstance(value, partial) else value
    if depth > _DEEPEST or isinstance(value, nn.Module) or not callable(value):
        return
    for cell in getattr(value, "__closure__", None) or ():
        contents = contents_of(cell)
        if (fresh := renewed(contents)) is not contents:
            cell.cell_contents = fresh
            undo.append(partial(setattr, cell, "cell_contents", contents))
        else:
            _replace_within(contents, renewed, depth + 1, undo)
    attributes = getattr(value, "__dict__", {})
    for name, each in list(attributes.items()) if isinstance(attributes, dict) else ():
        if (fresh := renewed(each)) is not each:
            attributes[name] = fresh
            undo.append(partial(attributes.__setitem__, name, each))
        else:
            _replace_within(each, renewed, depth + 1, undo)


def _equivalence(function: Function, depth: int) -> Hashable:
    if not isinstance(function, FunctionType) or depth > _DEEPEST:
        return id(function)
    cells = tuple(_value(contents_of(cell), depth + 1) for cell in function.__closure__ or ())
    defaults = (_value(function.__defaults__, depth), _value(function.__kwdefaults__, depth))
    return (function.__code__, _used_globals(function), cells, defaults)


def _used_globals(function: FunctionType) -> tuple[Any, ...]:
    namespace = function.__globals__
    return tuple((name, id(namespace[name])) for name in _names_of(function.__code__) if name in namespace)


@lru_cache(maxsize=512)
def _names_of(code: CodeType) -> list[str]:
    return sorted({name for each in _codes(code) for name in each.co_names})


def _value(contents: Any, depth: int) -> Hashable:
    if isinstance(contents, (bool, int, float, str, type(None))):
        return (type(contents), contents)
    if isinstance(contents, tuple):
        return tuple(_value(each, depth) for each in contents)
    if isinstance(contents, dict):
        return tuple((name, _value(each, depth)) for name, each in contents.items())
    return _equivalence(contents, depth)


def layers(function: Any, depth: int = 0) -> Iterator[FunctionType]:
    """``function``, and the functions that it closes over."""
    function = getattr(function, "__func__", function)
    if not isinstance(function, FunctionType) or depth > _DEEPEST:
        return
    yield function
    for cell in function.__closure__ or ():
        yield from layers(contents_of(cell), depth + 1)


def _held(value: Any, depth: int) -> Iterator[Any]:
    yield value
    if depth > _DEEPEST:
        return
    within: tuple[Any, ...] = ()
    if isinstance(value, FunctionType):
        kept = (value.__defaults__ or (), (value.__kwdefaults__ or {}).values())
        within = (*(contents_of(cell) for cell in value.__closure__ or ()), *kept[0], *kept[1])
    elif isinstance(value, MethodType):
        within = (value.__self__, value.__func__)
    elif isinstance(value, partial):
        within = (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, (tuple, list)):
        within = tuple(value)
    elif isinstance(value, dict):
        within = tuple(value.values())
    for each in within:
        yield from _held(each, depth + 1)


def _codes(code: CodeType) -> Iterator[CodeType]:
    """``code``, and the code of the functions that are defined in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (tuple, list, frozenset)):
        for each in value:
            yield from _strings(each)


def contents_of(cell: CellType) -> Any:
    """What the variable of ``cell`` is; ``None`` if it has not been assigned yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None
