"""The ways there and back as autograd functions: each one's backward is an exchange the other way.

Every rank calls them in the same order, in forward and in backward, whatever its counts: they are collectives.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from veomni_core.kernels import first_derivatives_only
from veomni_triton_moe.token_dispatch.exchange import Exchange
from veomni_triton_moe.token_dispatch.row_layout import RowLayout
from veomni_triton_moe.token_dispatch.rows import OVERFLOW, chosen_weights, packed, summed_rows, taken_rows


class There(torch.autograd.Function):
    """``hidden[T, H]``, ``weights[T, K]`` become the experts' ``rows[R, H]``, ``weights[R, K]``, ``index[R, K]``."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weights: Tensor, exchange: Exchange) -> tuple[Tensor, Tensor, Tensor]:
        buffer, layout = packed(hidden, weights, exchange)
        buffer = exchange.there(buffer)
        index = layout.ids(buffer).long()
        if exchange.overflow is not None:
            torch._assert_async((index != OVERFLOW).all(), _TOO_MANY)
        ctx.exchange, ctx.layout = exchange, layout
        ctx.mark_non_differentiable(index)
        # Rows are copied out of the buffer, where weights and ids lie between them: the experts' first product gathers
        # rows, and is faster where they are next to each other.
        return layout.hidden(buffer).contiguous(), layout.weights(buffer).contiguous(), index

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, drows: Tensor, dweights: Tensor, _: Any) -> tuple[Tensor, Tensor, None]:
        exchange, there = ctx.exchange, ctx.layout
        layout = RowLayout(there.width, there.dtype, there.choices, there.weights_dtype, has_ids=False)
        buffer = layout.empty(exchange.rows_received, drows.device)
        layout.hidden(buffer).copy_(drows)
        layout.weights(buffer).copy_(dweights)
        buffer = exchange.back(buffer)
        return summed_rows(layout.hidden(buffer), exchange), chosen_weights(layout.weights(buffer), exchange), None


class Back(torch.autograd.Function):
    """``(partial_sums[R, H], exchange)`` to the tokens' sums ``[T, H]``."""

    @staticmethod
    def forward(ctx: Any, partial_sums: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return summed_rows(exchange.back(partial_sums.contiguous()), exchange)

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, dresult: Tensor) -> tuple[Tensor, None]:
        exchange: Exchange = ctx.exchange
        rows = dresult.new_empty(exchange.rows_sent, dresult.shape[1])
        return exchange.there(taken_rows(dresult, exchange, rows)), None


_TOO_MANY = (
    "alltoall_dedup: a rank has more tokens for another rank than max_tokens allows. Set a higher max_tokens (a "
    "rank's number of tokens always suffices), or 0 for no bound"
)
