"""Whether a layer tells a layer that it calls where packed sequences begin, as its code shows.

Most decoder layers pass all their keyword arguments on. Some call a short convolution with its input alone, and what
the model was told of boundaries ends there.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from functools import lru_cache
from types import CodeType

from torch import nn

from veomni_transformers.proving.functions import code_layers, current_forward

# The arguments by which layers are told; the last one is our own, and says it of the rows of a batch.
BOUNDARIES = ("seq_idx", "cu_seq_lens_q", "cu_seqlens_of_rows")


def keeps_boundaries(layer: nn.Module, child: str) -> bool:
    """Whether the forward of ``layer`` calls its child module of this name, and passes nothing on of boundaries.

    Where its code can't be read, or calls the child in another way, it is taken to pass them on.

    Example:
        >>> class Layer(nn.Module):
        ...     def forward(self, x, **kwargs):
        ...         return self.mixer(self.norm(x), **kwargs)
        >>> keeps_boundaries(Layer(), "norm"), keeps_boundaries(Layer(), "mixer")
        (True, False)
    """
    calls = [
        tells for code in code_layers(current_forward(layer)) for name, tells in _calls(code.__code__) if name == child
    ]
    return bool(calls) and not all(calls)


def takes_boundaries(layer: nn.Module) -> tuple[str, ...]:
    """Those of :data:`BOUNDARIES` that the forward of ``layer`` can be given.

    Example:
        >>> takes_boundaries(nn.Linear(2, 2))
        ()
    """
    parameters = inspect.signature(current_forward(layer)).parameters
    anything = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    return tuple(name for name in BOUNDARIES if anything or name in parameters)


@lru_cache(maxsize=1024)
def _calls(code: CodeType) -> tuple[tuple[str, bool], ...]:
    """The attributes of ``self`` that ``code`` calls, each with whether it is told of boundaries there."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, TypeError, SyntaxError):
        return ()
    return tuple(_calls_in(tree))


def _calls_in(tree: ast.AST) -> Iterator[tuple[str, bool]]:
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="self"), attr=name), keywords=keywords):
                # An argument without a name is `**kwargs`.
                yield name, any(each.arg is None or each.arg in BOUNDARIES for each in keywords)
