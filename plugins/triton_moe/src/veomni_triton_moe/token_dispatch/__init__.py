"""alltoall_dedup: one row for each token and rank, there and back, by one all-to-all each way.

Dimensions, here and in all modules of this package: ``T`` tokens of this rank, ``K`` choices per token, ``W`` ranks,
``L`` experts per rank, ``S`` rows that this rank sends, ``R`` rows that it gets, ``H`` hidden.

A token whose experts are on two ranks is sent twice, however many experts they are. A row carries its hidden values,
its routing weights and its local expert ids, so the experts get tokens and their choices as in a layer of one rank.
They give the weighted sum over a row's choices; one row goes back, and the token's rows are summed in float32.

``exchange`` says which rows go where; ``row_layout`` is what a row carries; ``rows`` copies and sums rows, in PyTorch
or by the Triton kernels of ``row_kernels``; ``both_ways`` is what autograd sees.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from veomni_ops.expert_ranks import ExpertRanks, Experts
from veomni_triton_moe.token_dispatch.both_ways import Back, There
from veomni_triton_moe.token_dispatch.exchange import Exchange


def alltoall_dedup(max_tokens: int = 0) -> partial[Tensor]:
    """The kernel.

    Args:
        max_tokens: how many rows each rank sends to every rank, padded where there are fewer: the host then waits for
            no count. With 0 each rank sends what it has, and the host waits once a layer.
    """
    return partial(_dispatched, max_tokens=max_tokens)


def _dispatched(
    hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor, experts: Experts, ranks: ExpertRanks, *, max_tokens: int
) -> Tensor:
    exchange = Exchange.of(top_k_index, ranks, max_tokens)
    rows, weights, index = There.apply(hidden, top_k_weights, exchange)
    partial_sums = experts(rows, index, weights)
    return Back.apply(partial_sums.to(hidden.dtype), exchange)
