"""Device code that copies and sums rows. Each program writes rows of its own, so sums have one order.

T tokens, K choices per token, W ranks, L experts per rank, S rows to send, H hidden. A place is `rank * T + token`, or
-1 for a row of padding. Offsets of rows are int64, since S * H can exceed 2**31.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from veomni_ops.sizes import ceil_div, power_of_two
from veomni_ops.triton_launches import triton_kernel

_WIDEST = 2048  # columns per program: 16 values for each thread of 4 warps; narrower rows are one block
_ROWS = 64  # rows per program where a row is K values


def take(tokens: Tensor, places: Tensor, rows: Tensor) -> None:
    """Write ``tokens[T, H]`` at each of ``places[S]`` to ``rows[S, H]``, which may have a stride; zeros for padding."""
    count, width = rows.shape
    if not rows.numel():
        return
    tokens = tokens if tokens.stride(1) == 1 else tokens.contiguous()
    block = min(power_of_two(width), _WIDEST)
    grid = (count, ceil_div(width, block))
    _take[grid](tokens, places, rows, len(tokens), tokens.stride(0), rows.stride(0), width, BLOCK=block, num_warps=4)


def add_up(rows: Tensor, slots: Tensor) -> Tensor:
    """The sums ``[T, H]`` of the rows of ``rows[S, H]`` that ``slots[T, W]`` names for each token, in float32."""
    (tokens, ranks), width = slots.shape, rows.shape[1]
    result = torch.empty(tokens, width, dtype=rows.dtype, device=rows.device)
    if not result.numel():
        return result
    block = min(power_of_two(width), _WIDEST)
    grid = (tokens, ceil_div(width, block))
    _add_up[grid](rows, slots, result, rows.stride(0), width, W=ranks, BLOCK=block, num_warps=4)
    return result


def local_choices(
    index: Tensor,
    weights: Tensor,
    places: Tensor,
    ids: Tensor,
    row_weights: Tensor,
    local_experts: int,
    overflow: Tensor | None,
) -> None:
    """Write what each row's rank gets of its token's choices: local ids, and routing weights.

    Args:
        index: ``[T, K]``, contiguous.
        weights: ``[T, K]``.
        places: ``[S]``.
        ids: ``[S, K]``, written; ``L`` for a choice of another rank.
        row_weights: ``[S, K]``, written; 0 for a choice of another rank.
        local_experts: ``L``.
        overflow: whether all ids are -1 instead, a tensor of one element.
    """
    (count, choices), weights = ids.shape, weights.contiguous()
    if not ids.numel():
        return
    _local_choices[(ceil_div(count, _ROWS),)](
        index,
        weights,
        places,
        ids,
        row_weights,
        overflow,
        count,
        len(index),
        local_experts,
        choices,
        ids.stride(0),
        row_weights.stride(0),
        ROWS=_ROWS,
        CHOICES=power_of_two(choices),
        num_warps=4,
    )


@triton_kernel(do_not_specialize=["length"])
def _take(
    tokens,  # [T, H], rows `stride` apart
    places,  # [S]
    rows,  # [S, H], rows `row_stride` apart, written
    length,  # T
    stride,
    row_stride,
    width,  # H
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    place = tl.load(places + row)
    filled = place >= 0
    token = tl.where(filled, place, 0) % tl.maximum(length, 1)
    value = tl.load(tokens + token * stride + column, mask=filled & (column < width), other=0.0)  # [BLOCK]
    tl.store(rows + row * row_stride + column, value, mask=column < width)


@triton_kernel
def _add_up(
    rows,  # [S, H], rows `stride` apart
    slots,  # [T, W]; -1 for no row
    result,  # [T, H], contiguous, written
    stride,
    width,  # H
    W: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    total = tl.zeros((BLOCK,), tl.float32)  # [BLOCK]
    for rank in range(W):
        slot = tl.load(slots + token * W + rank).to(tl.int64)
        mask = (slot >= 0) & (column < width)
        total += tl.load(rows + slot * stride + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(result + token * width + column, total.to(result.dtype.element_ty), mask=column < width)


@triton_kernel(do_not_specialize=["count", "length"])
def _local_choices(
    index,  # [T, K], contiguous
    weights,  # [T, K], contiguous
    places,  # [S]
    ids,  # [S, K], rows `ids_stride` apart, written
    row_weights,  # [S, K], rows `weights_stride` apart, written
    overflow,  # [] or None
    count,  # S
    length,  # T
    local_experts,  # L
    choices,  # K
    ids_stride,
    weights_stride,
    ROWS: tl.constexpr,
    CHOICES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    k = tl.arange(0, CHOICES)[None, :]  # [1, CHOICES]
    place = tl.load(places + row, mask=row < count, other=-1)  # [ROWS]
    whole = tl.maximum(length, 1)
    origin = tl.where(place >= 0, place, 0)
    token, rank = (origin % whole)[:, None], (origin // whole)[:, None]  # [ROWS, 1]
    asked = (place >= 0)[:, None] & (k < choices)  # [ROWS, CHOICES]
    local = tl.load(index + token * choices + k, mask=asked, other=-1) - rank * local_experts
    here = asked & (local >= 0) & (local < local_experts)
    weight = tl.load(weights + token * choices + k, mask=here, other=0.0)
    number = tl.where(here, local, local_experts)
    if overflow is not None:
        number = tl.where(tl.load(overflow).to(tl.int1), -1, number)
    mask = (row < count)[:, None] & (k < choices)
    tl.store(ids + row[:, None] * ids_stride + k, number.to(tl.int32), mask=mask)
    tl.store(row_weights + row[:, None] * weights_stride + k, weight, mask=mask)
