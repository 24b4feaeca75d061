"""Sums over an expert's rows: the gradients of its weights and biases. An expert without rows gets zeros."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from veomni_ops.sizes import ceil_div
from veomni_ops.triton_descriptors import described, described_rows
from veomni_ops.triton_gpus import multiprocessors
from veomni_ops.triton_launches import triton_kernel
from veomni_triton_moe.moe_experts.launch import Launch
from veomni_triton_moe.moe_experts.routing import Routing
from veomni_triton_moe.moe_experts.tiles import halves, load_group, tile_position


def weight_gradient(
    left: Tensor, right: Tensor, routing: Routing, launch: Launch, use_descriptors: bool, into: Tensor | None = None
) -> Tensor:
    """``left[g].T @ right[g]`` for the group ``g`` of each expert, summed in float32: ``[E, A, B]``.

    Args:
        left: ``[N, A]``, contiguous.
        right: ``[N, B]``, contiguous.
        routing: Which rows are whose.
        launch: Sizes of the tiles: ``block_m`` of A, ``block_n`` of B, and ``block_k`` rows at a time.
        use_descriptors: Whether to load, and without ``into`` to store, through TMA descriptors.
        into: ``[E, A, B]``, contiguous: the product is added to it before it is rounded.

    Returns:
        ``into``, or a new tensor in left's dtype; zeros for experts without rows.
    """
    m, n, k = launch.block_m, launch.block_n, launch.block_k
    height, width = left.shape[1], right.shape[1]
    result = left.new_empty(routing.experts, height, width) if into is None else into
    a, b, target = left, right, result
    if use_descriptors:
        # Ragged: rows are the reduced dimension here, so those of the next group must read as zeros.
        a, b = described_rows(left, (k, m)), described_rows(right, (k, n))
        # When accumulating, loads and stores go through pointers: a TMA load of the output tile would need a third
        # shared-memory buffer.
        target = described(result, (1, m, n // 2 if launch.halved_store else n)) if into is None else result
    tiles = routing.experts * ceil_div(height, m) * ceil_div(width, n)
    _weight_gradient[(min(multiprocessors(left.device) * launch.programs, tiles),)](
        a,
        b,
        target,
        routing.offsets,
        routing.experts,
        height,
        width,
        DESCRIBED=use_descriptors,
        ADD=into is not None,
        HALVED=launch.halved_store,
        BLOCK_M=m,
        BLOCK_N=n,
        BLOCK_K=k,
        GROUP_M=launch.group_m,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )
    return result


def bias_gradient(rows: Tensor, routing: Routing, weights: Tensor | None = None) -> Tensor:
    """The sum of each expert's rows, times their routing weights where given: ``[E, A]``.

    Args:
        rows: ``[N, A]``, contiguous.
        routing: Which rows are whose.
        weights: ``[T, K]``, contiguous.
    """
    width = rows.shape[1]
    result = rows.new_empty(routing.experts, width)
    # A program per expert and 128 columns goes through all of the expert's rows: no atomics, so one order.
    _bias_gradient[(routing.experts, ceil_div(width, 128))](
        rows, weights, result, routing.route_of_row, routing.offsets, width, BLOCK_R=64, BLOCK_C=128, num_warps=4
    )
    return result


# T tokens, K choices per token, N = T * K rows, sorted by expert; E experts. left and right have A and B columns. The
# rows of a group are the reduced dimension, BLOCK_K at a time; their number differs by expert and is known only on the
# device. One program reduces a tile over all rows of its group: no split along the rows, and so no atomics.
@triton_kernel(do_not_specialize=["experts"])
def _weight_gradient(
    left,  # [N, A], or a ragged descriptor of it with blocks [BLOCK_K, BLOCK_M]
    right,  # [N, B], or a ragged descriptor of it with blocks [BLOCK_K, BLOCK_N]
    target,  # [E, A, B], written; if DESCRIBED and not ADD a descriptor: blocks [1, BLOCK_M, BLOCK_N], half if HALVED
    offsets,  # [E + 1]
    experts,  # E
    height,  # A
    width,  # B
    DESCRIBED: tl.constexpr,
    ADD: tl.constexpr,
    HALVED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    m_tiles, n_tiles = tl.cdiv(height, BLOCK_M), tl.cdiv(width, BLOCK_N)
    per_expert = m_tiles * n_tiles
    # All tiles of one expert before the next expert's, so that concurrent programs share its rows in the L2 cache.
    # flatten merges the loops over tiles and rows, so that the pipeline loads a tile's first rows while the tile before
    # it is stored.
    for tile in tl.range(tl.program_id(0), experts * per_expert, tl.num_programs(0), flatten=DESCRIBED):
        expert = tile // per_expert
        m, n = tile_position(tile % per_expert, m_tiles, n_tiles, GROUP_M)
        start = tl.load(offsets + expert)
        size = tl.load(offsets + expert + 1) - start
        # Without rows the loop below doesn't run, and the zeros are stored: the result is not initialised.
        product = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)  # [BLOCK_M, BLOCK_N]
        for row in range(0, size, BLOCK_K):
            # a [BLOCK_K, BLOCK_M] and b [BLOCK_K, BLOCK_N]; rows beyond the group are zeros in both.
            a = load_group(left, start, size, row, m * BLOCK_M, height, BLOCK_K, BLOCK_M, DESCRIBED)
            b = load_group(right, start, size, row, n * BLOCK_N, width, BLOCK_K, BLOCK_N, DESCRIBED)
            # ieee: float32 operands are multiplied exactly, not as TF32; it changes nothing for 16-bit ones.
            product = tl.dot(a.T, b, product, input_precision="ieee")
        if DESCRIBED and not ADD:
            # No mask: the descriptor is bounded by [E, A, B], and a tile lies within one expert.
            line, column, value = m * BLOCK_M, n * BLOCK_N, product.to(target.dtype)
            if HALVED:
                left_half, right_half = halves(value, BLOCK_M, BLOCK_N)  # [BLOCK_M, BLOCK_N // 2]
                target.store([expert, line, column], tl.reshape(left_half, (1, BLOCK_M, BLOCK_N // 2)))
                column += BLOCK_N // 2
                target.store([expert, line, column], tl.reshape(right_half, (1, BLOCK_M, BLOCK_N // 2)))
            else:
                target.store([expert, line, column], tl.reshape(value, (1, BLOCK_M, BLOCK_N)))
        else:
            line = m * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
            column = n * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
            # int64, since E * A * B can exceed 2**31. [BLOCK_M, BLOCK_N], as the mask
            at = (expert.to(tl.int64) * height + line[:, None]) * width + column[None, :]
            mask = (line < height)[:, None] & (column < width)[None, :]
            if ADD:
                # Before rounding: the sum is rounded once, where autograd's addition would round the product too.
                product += tl.load(target + at, mask=mask, other=0).to(tl.float32)
            tl.store(target + at, product.to(target.dtype.element_ty), mask=mask)


@triton_kernel
def _bias_gradient(
    rows,  # [N, A]
    weights,  # [T, K] or None
    result,  # [E, A], written
    route_of_row,  # [N]
    offsets,  # [E + 1]
    width,  # A
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    expert = tl.program_id(0)
    start = tl.load(offsets + expert)
    size = tl.load(offsets + expert + 1) - start
    column = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)  # [BLOCK_C]
    # A sum per place in a block of rows, and across the block once at the end: one reduction between threads, not one
    # per block, and shorter chains of additions.
    total = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)  # [BLOCK_R, BLOCK_C], as `value`
    for row in range(0, size, BLOCK_R):
        value = load_group(rows, start, size, row, tl.program_id(1) * BLOCK_C, width, BLOCK_R, BLOCK_C, False)
        value = value.to(tl.float32)  # summed in float32 whatever the rows' dtype
        if weights is not None:
            place = row + tl.arange(0, BLOCK_R)  # [BLOCK_R]
            # Places beyond the group read no weight: times zero, one that is not finite would make their sum NaN.
            route = tl.load(route_of_row + start + place, mask=place < size, other=0)
            value *= tl.load(weights + route, mask=place < size, other=0.0)[:, None].to(tl.float32)
        total += value
    tl.store(result + expert * width + column, tl.sum(total, axis=0).to(result.dtype.element_ty), mask=column < width)
