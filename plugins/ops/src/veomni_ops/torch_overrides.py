"""What of torch's own operators runs as other code than torch brings: ``torch.backends.python_native`` (torch 2.13).

Bound kernels and eager code are made of these operators. torch itself replaces some on some GPUs; a process can take
that back, and add replacements of its own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

PYTHON_NATIVE = "torch.backends.python_native"
_ORDER = "TORCH_PYTHON_NATIVE_USER_GRAPH_ORDER_FN"


def changed_overrides() -> str:
    """What this process has changed of torch's own choice, as phrases; empty if nothing. Doesn't import torch.

    Example:
        >>> changed_overrides()  # of a process that left torch's choice alone
        ''
    """
    return ", ".join(_changes(sys.modules.get("torch._native.registry")))


def _changes(registry: Any) -> Iterator[str]:
    if order := os.environ.get(_ORDER):
        yield f"in the order of {order}"
    if registry is None:
        return
    filters = registry._filter_state
    for name in sorted({*filters._dsl_names, *filters._op_symbols, *filters._dispatch_keys}):
        yield f"without {name}"
    for (op, key), nodes in sorted(registry._graphs.items()):
        for node in nodes:
            if node.active and not code_of(node).startswith("torch._native."):
                yield f"{op} on {key} by {code_of(node)}"


def code_of(node: Any) -> str:
    """The function that ``node`` of torch's registry puts in an operator's place: its module and its name.

    Example:
        >>> from types import SimpleNamespace
        >>> code_of(SimpleNamespace(impl_fn=len))
        'builtins.len'
    """
    function = getattr(node.impl_fn, "func", node.impl_fn)
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', type(function).__name__)}"
