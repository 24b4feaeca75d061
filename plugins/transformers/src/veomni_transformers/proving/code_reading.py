"""Reads the code of a module before anything is proven about it: what it depends on, and what it changes.

A proof holds only as long as what the code depends on stays the same. So a module is not proven if its code reads
something whose later change nobody could detect, or if it sets attributes or globals. The code of torch and of the
standard library is taken as fixed, and so are transformers' constants (``ALL_CAPS``).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from veomni_core.changes.change import setter_of
from veomni_transformers.proving.functions import closure_contents, code_layers, is_layer_of_a_function
from veomni_transformers.proving.probe import has_hooks
from veomni_transformers.proving.reachable_code import (
    instructions,
    is_cached_by_library,
    is_library,
    nested_code,
    optional_arguments,
    reached_functions,
)

Function = Callable[..., Any]
_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.Size)
_FIXED = (FunctionType, BuiltinFunctionType, MethodType, type, ModuleType, torch.dtype, logging.Logger)


@dataclass(frozen=True)
class Reading:
    """What the code of a module, or of a function, reads.

    Attributes:
        names: the attributes and methods that it may read on any object.
        doubts: reasons why a proof of it would not last.
        codes: the code objects whose branches a proof must run, each with the names of its optional arguments.
    """

    names: frozenset[str]
    doubts: tuple[str, ...]
    codes: Mapping[CodeType, frozenset[str]]

    @property
    def modes(self) -> tuple[bool, ...]:
        """The values of ``training`` to run the code with."""
        return (True, False) if "training" in self.names else (True,)

    def with_children(self, readings: Iterable[Reading]) -> Reading:
        """This reading, with the names and code objects of the children that the code runs, but not their doubts."""
        all_of_them = (self, *readings)
        return Reading(
            frozenset().union(*(each.names for each in all_of_them)),
            self.doubts,
            {code: optional for each in all_of_them for code, optional in each.codes.items()},
        )


class Readings:
    """Reads modules, each class once."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Reading] = {}

    def of(self, module: nn.Module, selected: Any = None) -> Reading:
        """The reading of the class's forward, with what it calls and the functions among ``module``'s attributes.

        And with the names that ``selected`` reads, a function that runs in the forward's place.
        """
        kind = type(module)
        callables = (FunctionType, functools.partial, MethodType)
        held = tuple(value for value in vars(module).values() if isinstance(value, callables))
        key = (kind, kind.forward, held, selected)
        if key not in self._known:
            names = frozenset() if selected is None else read_function(selected, kind).names
            read = read_function(kind.forward, kind, held)
            self._known[key] = replace(read, names=read.names | names)
        return self._known[key]


def read_function(function: Any, kind: type | None = None, further: Iterable[Any] = ()) -> Reading:
    """What ``function`` reads, a method of ``kind`` where one is given; ``further`` are functions that it may call."""
    names: set[str] = set()
    doubts: dict[str, None] = {}
    codes: dict[CodeType, frozenset[str]] = {}
    for reached in reached_functions([function, *further], kind):
        for code in nested_code(reached.__code__):
            names.update(code.co_names)
            names.update(const for const in code.co_consts if isinstance(const, str) and const.isidentifier())
            if not is_library(reached):
                codes[code] = optional_arguments(reached) if code is reached.__code__ else frozenset()
                doubts.update(dict.fromkeys(_doubts(reached, code)))
    return Reading(frozenset(names), tuple(doubts), codes)


def unseen_changes(module: nn.Module, reading: Reading, live: Iterable[str] = ()) -> str:
    """Why a change of what ``module``'s code reads could not be detected after bind; empty if all could be.

    Args:
        live: parameters and children that the bound forward reads itself, at each call.
    """
    if own := set_on_instance(module):
        return own
    if reading.doubts:
        return reading.doubts[0]
    for name in sorted(reading.names - set(live)):
        if module._buffers.get(name) is not None:
            return f"its forward reads the buffer {name}, whose later changes can't be seen"
        if name in vars(module) and name not in ("training", "_modules", "_parameters", "_buffers"):
            value = vars(module)[name]
            if not (is_fixed(value) or _is_the_dispatcher_s(module, name)):
                return f"its forward reads {name}, a {type(value).__name__}, whose later changes can't be seen"
    for name, child in module._modules.items():
        if child is not None and name in reading.names and name not in live and (why_not := _of_bypassed(name, child)):
            return why_not
    return ""


def set_on_instance(module: nn.Module) -> str:
    """Who set a ``forward`` on this instance, as accelerate's hooks do; empty if nobody did.

    Such a forward takes precedence over the class's, which is the one that a binding replaces.
    """
    setter = setter_of(module)
    return f"its forward was set on the instance: it was {setter}" if setter else ""


def why_not_clonable(function: Any, names: Collection[str]) -> str:
    """Why a clone of ``function`` with other values for the globals ``names`` would behave differently; empty if not.

    A clone has its own namespace. It does not see globals that are set in the function's module later, and that module
    does not see globals that the clone sets. A layer that the package ``kernels`` made of a function is changed in
    place, by a kernel of the Hub, and the clone calls that same layer. One with hooks calls those too.
    """
    for layer in code_layers(function):
        if set(names).isdisjoint(layer.__code__.co_names):
            continue
        for code in nested_code(layer.__code__):
            for doubt in _global_doubts(layer, code, is_shared=_is_plain_layer_of_a_function):
                return doubt
    return ""


def _is_plain_layer_of_a_function(value: Any) -> bool:
    """Whether nothing but its function runs where it is called."""
    return is_layer_of_a_function(value) and not has_hooks(value)


def is_fixed(value: Any) -> bool:
    """Whether ``value`` can only be replaced, and not be changed in place."""
    if isinstance(value, functools.partial):
        return is_fixed(value.func) and all(map(is_fixed, (*value.args, *value.keywords.values())))
    if isinstance(value, tuple):
        return all(map(is_fixed, value))
    return isinstance(value, (*_PLAIN, *_FIXED))


def _is_partial_of_fixed(value: Any) -> bool:
    return isinstance(value, functools.partial) and is_fixed(value)


def guarded_names(module: nn.Module, reading: Reading, live: Iterable[str] = ()) -> frozenset[str]:
    """The attributes of ``module`` that a proof of its code depends on; not ``training``: a proof runs both modes."""
    present = {name for name in reading.names if name in vars(module) or hasattr(type(module), name)}
    present |= reading.names & {*module._modules, *module._parameters, *module._buffers}
    return frozenset(present - set(live) - {"training", "forward", "__class__"} - _OF_EVERY_MODULE)


_OF_EVERY_MODULE = frozenset(dir(nn.Module())) - {"extra_repr"}


def bypassed(module: nn.Module, reading: Reading, live: Iterable[str]) -> Iterator[tuple[str, nn.Module]]:
    """``(name, child)`` of the children that the module's own code runs and a bound forward does not."""
    for name, child in module._modules.items():
        if child is not None and name in reading.names and name not in live:
            yield name, child


def _of_bypassed(name: str, child: nn.Module) -> str:
    """Why a bound forward can't do without calling ``child``; empty if it can."""
    if has_hooks(child):
        return f"its {name} has hooks, which a kernel in its place would not call"
    if any(True for _ in child.children()):
        return f"its {name} has children of its own"
    tensors = [each for each, value in (*child._parameters.items(), *child._buffers.items()) if value is not None]
    if tensors:
        return f"besides its linears it needs {name}, which has tensors of its own: {', '.join(tensors)}"
    why_not = unseen_changes(child, Readings().of(child))
    return f"its {name}: {why_not}" if why_not else ""


def _is_the_dispatcher_s(module: nn.Module, name: str) -> bool:
    """Whether nothing but transformers' wrapper, which selects an experts implementation, reads the config."""
    forward = type(module).forward
    inner = getattr(forward, "__wrapped__", None)
    if name != "config" or inner is None or forward.__code__.co_filename == inner.__code__.co_filename:
        return False
    dispatches = forward.__globals__["__name__"] == "transformers.integrations.moe"
    return dispatches and name not in read_function(inner, type(module)).names


def _doubts(function: FunctionType, code: CodeType) -> Iterator[str]:
    yield from _global_doubts(function, code)
    for instruction in instructions(code):
        if instruction.opname in ("STORE_ATTR", "DELETE_ATTR"):
            yield f"{function.__qualname__} sets the attribute {instruction.argval}"
    if not _is_transformers(function):
        for value in closure_contents(function):
            if not is_fixed(value):
                yield f"{function.__qualname__} closes over a {type(value).__name__}, whose later changes can't be seen"


def _global_doubts(
    function: FunctionType, code: CodeType, is_shared: Callable[[Any], bool] = lambda value: False
) -> Iterator[str]:
    where = function.__qualname__
    for instruction in instructions(code):
        name = instruction.argval
        if instruction.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            yield f"{where} sets the global {name}"
        elif instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME") and name in function.__globals__:
            value = function.__globals__[name]
            if is_shared(value) or is_cached_by_library(value):
                continue
            constant = _is_transformers(function) and name.lstrip("_").isupper()
            if not constant and not isinstance(value, _FIXED) and not _is_partial_of_fixed(value):
                yield f"{where} reads the global {name}, a {type(value).__name__}, whose later changes can't be seen"


def _is_transformers(function: FunctionType) -> bool:
    return str(function.__module__).split(".")[0] == "transformers"
