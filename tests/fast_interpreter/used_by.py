"""What a function of Triton's language uses beside its arguments: other functions, and constants of its module."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

_LIBRARIES = ("builtins", "math", "numpy", "torch", "triton")


def used_by(function: FunctionType) -> list[Any]:
    """Each object that ``function``, or a function that it calls, names; those of the libraries alone are not asked.

    A test that replaces one of them gets another list.
    """
    found, functions, met = [], [function], {id(function)}
    while functions:
        function = functions.pop()
        for value in _named(function):
            found.append(value)
            value = getattr(value, "fn", value)  # of what is under triton.jit
            if isinstance(value, FunctionType) and id(value) not in met and not _is_of_a_library(value.__module__):
                met.add(id(value))
                functions.append(value)
    return found


def _named(function: FunctionType) -> Iterator[Any]:
    names = _names(function.__code__)
    for name in names:
        value = function.__globals__.get(name)
        if isinstance(value, ModuleType) and not _is_of_a_library(value.__name__):
            yield from (vars(value)[each] for each in names if each in vars(value))
        elif value is not None:
            yield value
    for cell in function.__closure__ or ():
        yield cell.cell_contents


@functools.cache
def _names(code: CodeType) -> tuple[str, ...]:
    inner = (name for each in code.co_consts if isinstance(each, CodeType) for name in _names(each))
    return tuple(dict.fromkeys((*code.co_names, *inner)))


def _is_of_a_library(module: str | None) -> bool:
    return (module or "").partition(".")[0] in _LIBRARIES
