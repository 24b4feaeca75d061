"""Losses of a sequence whose parts lie on several ranks: each rank gets the value of the whole.

The rule for gradients: every rank differentiates the whole loss, and a parameter's gradient is the *average over the
ranks* of the group. Data-parallel wrappers (DDP, FSDP2) average over all ranks anyway, so they need no change. To make
up for that average, a collective whose result all ranks use in the same way multiplies the gradient by the number of
ranks in its backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed import _functional_collectives as collectives

from veomni_transformers.sequence.order import Order


def sum_over_ranks(part: Tensor, group: ProcessGroup) -> Tensor:
    """The sum of all ranks' ``part``, on every rank; backward multiplies the gradient by the number of ranks."""
    return _Sum.apply(part, group)


def whole_sequence(parts: Tensor, dim: int, order: Order) -> Tensor:
    """Gather all ranks' ``parts`` along ``dim``, for a loss that every rank computes from the whole.

    ``[.., S/n, ..] -> [.., S, ..]``; backward takes this rank's part of the gradient, times the number of ranks.
    """
    return _Gather.apply(parts, dim, order)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: ProcessGroup) -> Tensor:
        ctx.ranks = group.size()
        return collectives.wait_tensor(collectives.all_reduce(part, "sum", group))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.ranks, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Tensor, dim: int, order: Order) -> Tensor:
        ctx.dim, ctx.order = dim, order
        return order.whole(parts, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.order.part(gradients[0], ctx.dim) * ctx.order.group.size(), None, None
