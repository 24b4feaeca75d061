"""token_dispatch: how the tokens of a layer reach the ranks that hold their experts, and how the results come back.

``(hidden[T, H], top_k_index[T, K], top_k_weights[T, K], experts, ranks) -> [T, H]`` in hidden's dtype

``T`` tokens of this rank, ``K`` choices per token (int64 indices of all experts), ``H`` hidden size. Rank ``r`` holds
the experts ``[r * local_experts, (r + 1) * local_experts)``.

``experts(rows[R, H], local_index[R, J], weights[R, J]) -> [R, H]`` runs this rank's experts on the rows that it was
sent: the weighted sum over a row's choices. ``local_experts`` is the index of a choice that stands for no expert here;
weigh it with zero. A kernel calls it exactly once, without rows too: so backward reaches the experts on every rank.

Gradients of hidden, of the routing weights and of the experts are exact on every rank, whatever the counts: a rank may
have no token, get no row, or get all of them. A site's ``sizes``: ``experts`` (of all ranks), ``hidden``, ``ranks``
and, where the model says it, ``top_k``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from veomni_ops.contract import compute_dtype, no_samples
from veomni_ops.dispatch_samples import call, rank_samples, whole
from veomni_ops.expert_ranks import ExpertRanks, Experts
from veomni_ops.moe_experts import GRADIENTS, VALUES
from veomni_ops.rank_contract import RankContract

_Way = Callable[[Tensor], Tensor]


def exchanged(
    hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor, experts: Experts, ranks: ExpertRanks
) -> Tensor:
    """Every token to every rank, and the sum of what the ranks' experts give: simple, and as slow as that.

    Args:
        hidden: this rank's tokens ``[T, H]``.
        top_k_index: the experts of each token among those of all ranks, int64 ``[T, K]``.
        top_k_weights: their routing weights ``[T, K]``.
        experts: this rank's experts, see this module.
        ranks: the ranks, and this rank's place among them.

    Returns:
        ``[T, H]`` in hidden's dtype. The sum over ranks is accumulated in float32.

    Example:
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> ranks = ExpertRanks(dist.group.WORLD, size=1, rank=0, local_experts=2)
        >>> def experts(rows, local_index, weights):  # expert n multiplies by n
        ...     return rows * (local_index * weights).sum(dim=1, keepdim=True)
        >>> hidden, index, weights = torch.ones(1, 2), torch.tensor([[0, 1]]), torch.tensor([[5.0, 3.0]])
        >>> exchanged(hidden, index, weights, experts, ranks)
        tensor([[3., 3.]])
    """
    share = _share_of(len(hidden), ranks)
    rows, index, weights = (
        _Exchange.apply(x, share.spread, share.collect) for x in (hidden, top_k_index, top_k_weights)
    )
    local = index - ranks.rank * ranks.local_experts
    elsewhere = (local < 0) | (local >= ranks.local_experts)
    partial = experts(rows, local.masked_fill(elsewhere, ranks.local_experts), weights.masked_fill(elsewhere, 0.0))
    return _Exchange.apply(partial.to(compute_dtype(hidden)), share.collect, share.spread).to(hidden.dtype)


@dataclass(frozen=True)
class _Share:
    """The rows of one rank, ``[start, start + count)`` of the ``total`` rows of all ranks."""

    group: Any
    start: int
    count: int
    total: int

    def spread(self, mine: Tensor) -> Tensor:
        """The rows of all ranks, from each rank's own."""
        everyone = mine.new_zeros(self.total, *mine.shape[1:])
        everyone[self.start : self.start + self.count] = mine
        dist.all_reduce(everyone, group=self.group)
        return everyone

    def collect(self, partial: Tensor) -> Tensor:
        """This rank's rows of the sum over ranks, which is accumulated in float32."""
        total = partial.to(compute_dtype(partial), copy=True, memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self.group)
        return total[self.start : self.start + self.count].to(partial.dtype, copy=True)


def _share_of(count: int, ranks: ExpertRanks) -> _Share:
    counts: list[int] = [0] * ranks.size
    dist.all_gather_object(counts, count, group=ranks.group)
    return _Share(ranks.group, sum(counts[: ranks.rank]), count, sum(counts))


class _Exchange(torch.autograd.Function):
    """``there(tensor)``, whose gradient comes ``back``."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, there: _Way, back: _Way) -> Tensor:
        ctx.back = back
        return there(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return ctx.back(gradient), None, None


CONTRACTS = {
    "exchanged": RankContract(
        op_name="token_dispatch",
        variant="exchanged",
        reference=exchanged,
        samples=no_samples,
        values=VALUES,
        gradients=GRADIENTS,
        rank_samples=rank_samples,
        arguments=("hidden", "top_k_index", "top_k_weights", "the experts"),
        call=call,
        whole=whole,
    )
}
