"""The code that runs when a function is called, as far as names tell: decorated functions, methods, helpers."""

from __future__ import annotations

import dis
import functools
import inspect
import sys
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

from veomni_transformers.proving.functions import closure_contents

_NOT_READ = frozenset({"torch", "numpy", *sys.stdlib_module_names})


def own_function(module: nn.Module) -> FunctionType:
    """The forward of the module's class, without its decorators."""
    return inspect.unwrap(type(module).forward)


def is_library(function: Any) -> bool:
    """Whether the code of ``function`` is not read: torch's, NumPy's, the standard library's or transformers.utils'."""
    module = str(getattr(function, "__module__", ""))
    return module.split(".")[0] in _NOT_READ or module.startswith("transformers.utils")


def is_cached_by_library(value: Any) -> bool:
    """Whether ``value`` is such a function behind a cache: it answers as it did, as which version is installed."""
    return isinstance(value, functools._lru_cache_wrapper) and is_library(value)


def reached_functions(functions: Iterable[Any], kind: type | None) -> Iterator[FunctionType]:
    """Every function that a call of ``functions`` may run, found by the names in their code.

    ``kind`` is the class whose methods they may call.
    """
    waiting, seen = list(functions), set()
    while waiting:
        value = undecorated(waiting.pop())
        if not isinstance(value, FunctionType) or id(value) in seen:
            continue
        seen.add(id(value))
        yield value
        if is_library(value):
            continue
        waiting.extend(closure_contents(value))
        names = {name for code in nested_code(value.__code__) for name in code.co_names}
        loaded = [value.__globals__[name] for name in names if name in value.__globals__]
        spaces = [
            each for each in loaded if isinstance(each, ModuleType) and each.__name__.split(".")[0] not in _NOT_READ
        ]
        waiting.extend(loaded)
        for name in names:
            waiting.extend(_definitions(kind, name))
            waiting.extend(vars(space).get(name) for space in spaces)


def _definitions(kind: type | None, name: str) -> Iterator[Any]:
    """All definitions of a method in the class and its parents, since ``super()`` may call those."""
    for base in kind.__mro__ if kind is not None else ():
        if base is nn.Module:
            return
        value = vars(base).get(name)
        if isinstance(value, property):
            yield value.fget
        else:
            yield getattr(value, "__func__", value)


def undecorated(value: Any) -> Any:
    if isinstance(value, functools.partial):
        return undecorated(value.func)
    return value.__func__ if isinstance(value, MethodType) else value


@functools.lru_cache(maxsize=256)
def instructions(code: CodeType) -> tuple[dis.Instruction, ...]:
    """The instructions of ``code``; :mod:`dis` is slow, and models repeat their layers' code."""
    return tuple(dis.get_instructions(code))


def nested_code(code: CodeType) -> Iterator[CodeType]:
    yield code
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from nested_code(const)


def optional_arguments(function: FunctionType) -> frozenset[str]:
    """The names of the arguments with defaults, and of ``*args`` and ``**kwargs``."""
    kinds = inspect.Parameter
    return frozenset(
        name
        for name, parameter in inspect.signature(function, follow_wrapped=False).parameters.items()
        if parameter.default is not kinds.empty or parameter.kind in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)
    )
