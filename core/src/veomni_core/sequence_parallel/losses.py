"""Losses of a sequence whose parts lie on several ranks: each rank gets the value of the whole.

The rule for gradients: every rank differentiates the whole loss, so what a parameter gets, *averaged over the ranks*
of the group, is its gradient. Data-parallel wrappers (DDP, FSDP2) average over all ranks anyway, so they need no
change. A collective whose result all ranks use alike therefore multiplies the gradient by their number.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed import _functional_collectives as collectives

from veomni_core.sequence_parallel.slicing import gather_outputs, slice_input_tensor


def sum_over_ranks(part: Tensor, group: ProcessGroup) -> Tensor:
    """The sum of each rank's ``part``, on every rank; the gradient is multiplied by their number."""
    return _Sum.apply(part, group)  # type: ignore[no-any-return]


def whole_sequence(parts: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """The whole of which each rank has a part along ``dim``, for a loss that all ranks compute alike.

    ``[.., S/n, ..] -> [.., S, ..]``; the gradient is this rank's part of it, multiplied by the number of ranks.
    """
    return _Gather.apply(parts, dim, group)  # type: ignore[no-any-return]


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: ProcessGroup) -> Tensor:
        ctx.ranks = group.size()
        return collectives.wait_tensor(collectives.all_reduce(part, "sum", group))  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.ranks, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return gather_outputs(parts, dim, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return slice_input_tensor(gradients[0], ctx.dim, ctx.group) * ctx.group.size(), None, None
