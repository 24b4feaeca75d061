"""Finds layers whose code calls a child module without the arguments that say where packed sequences begin.

Most decoder layers pass all their keyword arguments on. Inkling's call their short convolutions with the input alone.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from functools import lru_cache
from types import CodeType

from torch import nn

from veomni_transformers.packed.boundaries import BOUNDS_OF_ROWS
from veomni_transformers.proving.functions import code_layers, current_forward

_BOUNDARIES = ("seq_idx", "cu_seq_lens_q", BOUNDS_OF_ROWS)


def drops_boundaries(layer: nn.Module, child: str) -> bool:
    """Whether the forward of ``layer`` calls its child module of this name, and passes it no boundaries.

    Where its code can't be read, or calls the child in another way, it is taken to pass them.

    Example:
        >>> class Layer(nn.Module):
        ...     def forward(self, x, **kwargs):
        ...         return self.mixer(self.norm(x), **kwargs)
        >>> drops_boundaries(Layer(), "norm"), drops_boundaries(Layer(), "mixer")
        (True, False)
    """
    codes = (code.__code__ for code in code_layers(current_forward(layer)))
    calls = [passes for code in codes for name, passes in _calls_in(_tree(code), layer) if name == child]
    return bool(calls) and not all(calls)


@lru_cache(maxsize=1024)
def _tree(code: CodeType) -> ast.AST:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, TypeError, SyntaxError):
        return ast.Module([], [])


def _calls_in(node: ast.AST, layer: nn.Module) -> Iterator[tuple[str, bool]]:
    """The attributes of ``self`` that ``layer`` calls, each with whether the call passes boundaries."""
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Name(id="self"), attr=name), keywords=keywords):
            # An argument without a name is `**kwargs`.
            yield name, any(each.arg is None or each.arg in _BOUNDARIES for each in keywords)
        case ast.If(
            test=ast.Compare(
                left=ast.Attribute(value=ast.Name(id="self"), attr=kind),
                ops=[ast.Eq()],
                comparators=[ast.Constant(value=value)],
            )
        ) if hasattr(layer, kind):  # a layer of several kinds: Nemotron-H calls its MLPs with the input alone
            for statement in node.body if getattr(layer, kind) == value else node.orelse:
                yield from _calls_in(statement, layer)
            return
    for each in ast.iter_child_nodes(node):
        yield from _calls_in(each, layer)
