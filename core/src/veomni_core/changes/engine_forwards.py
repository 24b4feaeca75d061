"""The forwards that transformers' distributed engine gives to instances, and what they call.

The engine's ``tp_forward`` and ``ep_forward`` prepare the inputs, call the ``forward`` that the module had when the
engine was applied, and bring the result back. They keep that forward in their closure, an ``ep_forward`` in the objects
that dispatch its tokens. So a kernel runs on local tensors if it takes the place of what they keep.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

from torch import nn

from veomni_core.changes.forward_functions import captures

_ENGINE = "transformers.distributed."


def engine_forward(module: nn.Module) -> FunctionType | None:
    """The forward that the engine gave to ``module``; ``None`` if it gave none, or other code has replaced it."""
    own = vars(module).get("forward")
    return own if isinstance(own, FunctionType) and own.__module__.startswith(_ENGINE) else None


def engine_calls(module: nn.Module, function: Callable[..., Any]) -> bool:
    """Whether the engine's forward of ``module`` calls ``function`` as the module's own forward."""
    return engine_forward(module) is not None and captures(module, function)
