"""Accumulates gradients under tensor parallelism, where transformers 5.23 would sum what it has already summed.

A parameter that every rank holds whole, but uses for its own heads only (``q_norm`` of Qwen3), gets a hook that sums
its gradient over the tensor-parallel group after each backward. It sums ``parameter.grad``, so what an earlier
micro-batch left there would be summed again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.distributed.tensor import DTensor


@contextmanager
def gradients_apart(model: nn.Module) -> Iterator[None]:
    """Take the gradients of whole parameters aside for one backward, and add them afterwards."""
    aside = [(p, p.grad) for p in model.parameters() if p.grad is not None and not isinstance(p, DTensor)]
    for parameter, _ in aside:
        parameter.grad = None
    yield
    for parameter, before in aside:
        if parameter.grad is not None:
            before += parameter.grad
        parameter.grad = before
