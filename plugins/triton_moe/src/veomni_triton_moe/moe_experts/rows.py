"""Rows between the order of tokens and the order of experts."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from veomni_triton_moe.moe_experts.routing import Routing

_WIDEST = 2048  # columns that one program holds; narrower rows take one step


def spread_rows(hidden: Tensor, routing: Routing) -> Tensor:
    """``hidden[T, H]`` copied to the rows of its routes: ``[N, H]``.

    A program reads a token once and writes it ``K`` times: reading by row instead reads ``K`` times as much.
    """
    width = hidden.shape[1]
    rows = hidden.new_empty(routing.routes, width)
    block = min(triton.next_power_of_2(width), _WIDEST)
    grid = (routing.tokens, triton.cdiv(width, block))
    _spread[grid](hidden, rows, routing.row_of_route, hidden.stride(0), width, K=routing.k, BLOCK=block, num_warps=4)
    return rows


def combine_rows(rows: Tensor, routing: Routing, result: Tensor, weights: Tensor | None = None) -> None:
    """Write the sum of each token's rows of ``rows[N, H]``, times ``weights[T, K]`` where given, to ``result[T, H]``.

    Taken in float32 in the order of ``K``. Dropped routes count nothing.
    """
    width = rows.shape[1]
    block = min(triton.next_power_of_2(width), _WIDEST)
    grid = (routing.tokens, triton.cdiv(width, block))
    _combine[grid](
        rows,
        weights,
        result,
        routing.row_of_route,
        routing.offsets,
        routing.experts,
        width,
        result.stride(0),
        K=routing.k,
        BLOCK=block,
        num_warps=4,
    )


@triton.jit
def _spread(hidden, rows, row_of_route, stride, width, K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(hidden + token * stride + column, mask=column < width)
    for k in tl.static_range(K):
        row = tl.load(row_of_route + token * K + k).to(tl.int64)
        tl.store(rows + row * width + column, value, mask=column < width)


@triton.jit(do_not_specialize=["experts"])
def _combine(
    rows, weights, result, row_of_route, offsets, experts, width, stride, K: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    kept = tl.load(offsets + experts)
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(K):
        row = tl.load(row_of_route + token * K + k).to(tl.int64)
        mask = (column < width) & (row < kept)
        value = tl.load(rows + row * width + column, mask=mask, other=0.0).to(tl.float32)
        if weights is not None:
            value *= tl.load(weights + token * K + k).to(tl.float32)
        total += value
    tl.store(result + token * stride + column, total.to(result.dtype.element_ty), mask=column < width)
