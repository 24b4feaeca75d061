"""Finds the functions that a method reaches through its module's globals, and replaces them for one instance.

The method is cloned with other globals, and with its own code object, so that ``torch.compile`` keeps separate caches.
Decorators that close over the method are cloned too. The module that defines the method is not changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

from torch import nn

from veomni_core.changes.engine_forwards import engine_forward
from veomni_core.changes.forward_functions import contents_of
from veomni_transformers.captured_cells import captured_cell

Function = Callable[..., Any]
# The most decorators that are looked through. It also ends the search in a function that closes over itself.
_DEEPEST = 6
_DECORATED = "func"  # the variable of a layer's forward that holds the function


def current_forward(module: nn.Module) -> Function:
    """The function that runs as ``module.forward``: the instance's own where one was set, else the class's.

    Where the instance's own is that of transformers' distributed engine, it is the class's, which the engine's calls.
    """
    own = None if engine_forward(module) else vars(module).get("forward")
    if isinstance(own, MethodType):
        return own.__func__
    return type(module).forward if own is None else own


def global_functions(function: Function) -> Iterator[tuple[str, Any]]:
    """``(name, value)`` of every global that the code of ``function``, or the code inside its decorators, names."""
    for layer in code_layers(function):
        for name in layer.__code__.co_names:
            if name in layer.__globals__:
                yield name, layer.__globals__[name]


def with_globals(function: Function, replacements: Mapping[str, Any]) -> Function:
    """A clone of ``function`` that sees ``replacements`` in place of the globals of those names.

    Args:
        function: a Python function, decorated or not.
        replacements: what the clone sees, by the global's name.

    Returns:
        The clone; ``function`` and its module are left as they are.

    Raises:
        LookupError: the code of ``function`` names none of the globals.

    Example:
        >>> from transformers.models.llama import modeling_llama
        >>> def no_rotation(q, k, cos, sin, unsqueeze_dim=1):
        ...     return q, k
        >>> forward = modeling_llama.LlamaAttention.forward
        >>> clone = with_globals(forward, {"apply_rotary_pos_emb": no_rotation})
        >>> clone.__globals__["apply_rotary_pos_emb"] is no_rotation
        True
        >>> forward.__globals__["apply_rotary_pos_emb"] is no_rotation
        False
        >>> with_globals(forward, {"silu": no_rotation})
        Traceback (most recent call last):
            ...
        LookupError: LlamaAttention.forward uses none of the globals silu
    """
    clone: Function = _cloned(function, replacements)
    if clone is function:
        raise LookupError(f"{function.__qualname__} uses none of the globals {', '.join(replacements)}")
    return clone


def within_layer(value: Any) -> Any:
    """The function of which the package ``kernels`` has made the layer ``value``, as transformers' decorators let it.

    What is no such layer is given back: a layer whose forward was replaced, by a kernel of the Hub, is none any more.
    """
    cell = captured_cell(current_forward(value), _DECORATED) if isinstance(value, nn.Module) else None
    return value if cell is None else cell.cell_contents


def is_layer_of_a_function(value: Any) -> bool:
    """Whether the package ``kernels`` has made ``value`` of a function."""
    return within_layer(value) is not value


def code_layers(function: Any, depth: int = 0) -> Iterator[FunctionType]:
    """``function``, the functions in its closure (what a decorator wraps), the functions in theirs, and so on."""
    if not isinstance(function, FunctionType) or depth > _DEEPEST:
        return
    yield function
    for contents in closure_contents(function):
        yield from code_layers(contents, depth + 1)


def closure_contents(function: FunctionType) -> Iterator[Any]:
    """What ``function`` closes over."""
    yield from map(contents_of, function.__closure__ or ())


def _cloned(function: Any, replacements: Mapping[str, Any], depth: int = 0) -> Any:
    if not isinstance(function, FunctionType) or depth > _DEEPEST:
        return function
    cells = tuple(_cloned_cell(cell, replacements, depth) for cell in function.__closure__ or ())
    named = {name: value for name, value in replacements.items() if name in _names(function.__code__)}
    named = {name: value for name, value in named.items() if name in function.__globals__}
    if not named and all(new is old for new, old in zip(cells, function.__closure__ or (), strict=True)):
        return function
    namespace = _namespace(function, named) if named else function.__globals__
    code = function.__code__.replace()
    clone = FunctionType(code, namespace, function.__name__, function.__defaults__, cells or None)
    clone.__kwdefaults__ = function.__kwdefaults__
    clone.__dict__.update(function.__dict__)
    clone.__qualname__, clone.__module__, clone.__doc__ = function.__qualname__, function.__module__, function.__doc__
    clone.__annotations__ = function.__annotations__
    return clone


def _names(code: CodeType) -> set[str]:
    """The globals and attributes that ``code`` names, and those of the functions that it defines."""
    inner = (_names(each) for each in code.co_consts if isinstance(each, CodeType))
    return set(code.co_names).union(*inner)


def _namespace(function: FunctionType, named: Mapping[str, Any]) -> dict[str, Any]:
    """The function's globals with ``named`` replaced, and without ``__name__``.

    ``torch.compile`` uses ``__name__`` to look globals up in the original module. It would guard the function that was
    replaced, not the one that runs, and a second model would silently share the first one's graph (seen with torch
    2.13). Without ``__name__`` it guards this dictionary.
    """
    return {name: value for name, value in {**function.__globals__, **named}.items() if name != "__name__"}


def _cloned_cell(cell: CellType, replacements: Mapping[str, Any], depth: int) -> CellType:
    contents = contents_of(cell)
    clone = _cloned(contents, replacements, depth + 1)
    return cell if clone is contents else CellType(clone)
