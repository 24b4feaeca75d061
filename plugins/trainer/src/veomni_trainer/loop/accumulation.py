"""What gradient accumulation has to do otherwise than transformers 5.23.

Under tensor parallelism it would sum what it has already summed: a parameter that every rank holds whole, but uses for
its own heads only (``q_norm`` of Qwen3), gets a hook that sums its gradient over the tensor-parallel group after each
backward. It sums ``parameter.grad``, so what an earlier micro-batch left there would be summed again.

And it would count the routers' load-balancing loss once per micro-batch, whose other losses it divides.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
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


def weight_of_aux_loss(loss: Tensor, aux_loss: Tensor, model: Any) -> Tensor | float:
    """By what a model multiplies its routers' loss before it adds it: their derivative, or else what its config names.

    A wrapper, such as DDP or a compiled model, may return the two by one function, past which nothing is derived.
    """
    if aux_loss.requires_grad and aux_loss.grad_fn is not None:
        (weight,) = torch.autograd.grad(loss, aux_loss, retain_graph=True, allow_unused=True)
        if weight is not None:
            return weight
    config = model.config.get_text_config()
    return float(getattr(config, "router_aux_loss_coef", getattr(config, "aux_loss_coef", 0.0)))
