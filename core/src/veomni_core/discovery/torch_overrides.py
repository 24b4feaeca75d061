"""What of torch's own operators runs as other code than torch brings: ``torch.backends.python_native`` (torch 2.13).

Bound kernels and eager code are made of these operators. torch itself replaces some on some GPUs; a process can take
that back, and add replacements of its own.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator
from typing import Any

PYTHON_NATIVE = "torch.backends.python_native"
_ORDER = "TORCH_PYTHON_NATIVE_USER_GRAPH_ORDER_FN"


def changed_overrides() -> str:
    """What this process has changed of torch's own choice, as phrases; empty if nothing. Doesn't import torch.

    Example:
        >>> import torch.backends.python_native as native
        >>> changed_overrides()
        ''
        >>> with native.operations_disabled("topk"):
        ...     changed_overrides()
        'without topk'
        >>> changed_overrides()
        ''
    """
    return ", ".join(_changes(sys.modules.get("torch._native.registry")))


def overrides_in_force() -> str:
    """Every replacement of an operator, for the comparison of ranks: how many, a hash, and what was changed."""
    registry = sys.modules.get("torch._native.registry")
    if registry is None:
        return ""
    active = [  # the first of an operator's whose condition holds is called
        f"{op} {key} {node.dsl_name} {_code(node)}"
        for (op, key), nodes in sorted(registry._graphs.items())
        for node in nodes
        if node.active and (op, key) in registry._aten_override_libs
    ]
    counted = f"{len(active)} operators ({hashlib.sha256(repr(active).encode()).hexdigest()[:8]})" if active else ""
    return ", ".join(filter(None, (counted, changed_overrides())))


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
            if node.active and not _code(node).startswith("torch._native."):
                yield f"{op} on {key} by {_code(node)}"


def _code(node: Any) -> str:
    function = getattr(node.impl_fn, "func", node.impl_fn)
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', type(function).__name__)}"
