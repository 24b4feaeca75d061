"""Copies between the order of tokens, ``[T, H]``, and the order of experts, ``[N, H]`` with a row per route."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from veomni_ops.sizes import ceil_div, power_of_two
from veomni_ops.triton_launches import triton_kernel
from veomni_triton_moe.moe_experts.routing import Routing

_WIDEST = 2048  # columns per program: 16 values for each thread of 4 warps; narrower rows are one block


def spread_rows(hidden: Tensor, routing: Routing) -> Tensor:
    """Copy each token of ``hidden[T, H]`` to the rows of its routes: ``[N, H]``, rows of dropped routes included.

    A program reads a token once and writes it ``K`` times; a program per row would read ``K`` times as much.
    """
    width = hidden.shape[1]
    rows = hidden.new_empty(routing.routes, width)
    block = min(power_of_two(width), _WIDEST)
    grid = (routing.tokens, ceil_div(width, block))
    _spread[grid](hidden, rows, routing.row_of_route, hidden.stride(0), width, K=routing.k, BLOCK=block, num_warps=4)
    return rows


def combine_rows(rows: Tensor, routing: Routing, result: Tensor, weights: Tensor | None = None) -> None:
    """Write the (weighted) sum of each token's rows to ``result``, in float32 and in the order of ``K``.

    Args:
        rows: ``[N, H]``, contiguous. Rows of dropped routes are not read.
        routing: Where each route's row is.
        result: ``[T, H]``, written; may be some columns of a wider tensor.
        weights: ``[T, K]``, contiguous; ones if ``None``.
    """
    width = rows.shape[1]
    block = min(power_of_two(width), _WIDEST)
    grid = (routing.tokens, ceil_div(width, block))
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


# T tokens, K choices per token, N = T * K routes and as many rows, E experts, H hidden. A program handles BLOCK columns
# of one token. Offsets of tokens and rows are int64, since N * H can exceed 2**31.


@triton_kernel
def _spread(
    hidden,  # [T, H], rows `stride` apart
    rows,  # [N, H], contiguous, written
    row_of_route,  # [N]
    stride,
    width,  # H
    K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    value = tl.load(hidden + token * stride + column, mask=column < width)  # [BLOCK], copied without a cast
    # Unrolled: K stores that don't wait for one another.
    for k in tl.static_range(K):
        row = tl.load(row_of_route + token * K + k).to(tl.int64)
        tl.store(rows + row * width + column, value, mask=column < width)


@triton_kernel(do_not_specialize=["experts"])
def _combine(
    rows,  # [N, H], contiguous
    weights,  # [T, K] or None
    result,  # [T, H], rows `stride` apart, written
    row_of_route,  # [N]
    offsets,  # [E + 1]
    experts,  # E
    width,  # H
    stride,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    # offsets[E] is the number of rows in groups: rows from here on are of dropped routes, which no product has written.
    kept = tl.load(offsets + experts)
    # A program gathers its token's rows in a fixed order. Scattering rows into tokens would take atomics, and so sum in
    # another order on every run.
    total = tl.zeros((BLOCK,), tl.float32)  # [BLOCK]
    for k in tl.static_range(K):
        row = tl.load(row_of_route + token * K + k).to(tl.int64)
        mask = (column < width) & (row < kept)
        value = tl.load(rows + row * width + column, mask=mask, other=0.0).to(tl.float32)
        if weights is not None:
            # A dropped route's weight counts for nothing, whatever it is: NaN times the zeros above would be NaN.
            value *= tl.load(weights + token * K + k, mask=row < kept, other=0.0).to(tl.float32)
        total += value
    tl.store(result + token * stride + column, total.to(result.dtype.element_ty), mask=column < width)
