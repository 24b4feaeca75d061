"""Sums over an expert's rows: the gradients of its weights and biases. An expert without rows gets zeros."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from veomni_triton_moe.moe_experts.launch import Launch
from veomni_triton_moe.moe_experts.routing import Routing
from veomni_triton_moe.moe_experts.tiles import (
    described,
    described_rows,
    load_group,
    tile_position,
)
from veomni_triton_moe.multiprocessors import multiprocessors


def weight_gradient(
    left: Tensor, right: Tensor, routing: Routing, launch: Launch, use_descriptors: bool, into: Tensor | None = None
) -> Tensor:
    """``left[g].T @ right[g]`` for each expert's rows ``g`` of ``left[N, A]`` and ``right[N, B]``: ``[E, A, B]``.

    Added to ``into[E, A, B]`` (contiguous) where given, before it is rounded; then that is what is returned.
    """
    m, n, k = launch.block_m, launch.block_n, launch.block_k
    height, width = left.shape[1], right.shape[1]
    result = left.new_empty(routing.experts, height, width) if into is None else into
    a, b, target = left, right, result
    if use_descriptors:
        a, b = described_rows(left, [k, m]), described_rows(right, [k, n])
        # A tile that is read first goes by pointers: the copy engine would need a third tile's shared memory for it.
        target = described(result, [1, m, n]) if into is None else result
    tiles = routing.experts * triton.cdiv(height, m) * triton.cdiv(width, n)
    _weight_gradient[(min(multiprocessors(left.device), tiles),)](
        a,
        b,
        target,
        routing.offsets,
        routing.experts,
        height,
        width,
        DESCRIBED=use_descriptors,
        ADD=into is not None,
        BLOCK_M=m,
        BLOCK_N=n,
        BLOCK_K=k,
        GROUP_M=launch.group_m,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )
    return result


def bias_gradient(rows: Tensor, routing: Routing, weights: Tensor | None = None) -> Tensor:
    """The sum of each expert's rows of ``rows[N, A]``, times the routes' ``weights[T, K]`` where given: ``[E, A]``."""
    width = rows.shape[1]
    result = rows.new_empty(routing.experts, width)
    _bias_gradient[(routing.experts, triton.cdiv(width, 128))](
        rows, weights, result, routing.route_of_row, routing.offsets, width, BLOCK_R=64, BLOCK_C=128, num_warps=4
    )
    return result


@triton.jit(do_not_specialize=["experts"])
def _weight_gradient(
    left,
    right,
    target,
    offsets,
    experts,
    height,
    width,
    DESCRIBED: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    m_tiles, n_tiles = tl.cdiv(height, BLOCK_M), tl.cdiv(width, BLOCK_N)
    per_expert = m_tiles * n_tiles
    for tile in tl.range(tl.program_id(0), experts * per_expert, tl.num_programs(0), flatten=DESCRIBED):
        expert = tile // per_expert
        m, n = tile_position(tile % per_expert, m_tiles, n_tiles, GROUP_M)
        start = tl.load(offsets + expert)
        size = tl.load(offsets + expert + 1) - start
        product = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for row in range(0, size, BLOCK_K):
            a = load_group(left, start, size, row, m * BLOCK_M, height, BLOCK_K, BLOCK_M, DESCRIBED)
            b = load_group(right, start, size, row, n * BLOCK_N, width, BLOCK_K, BLOCK_N, DESCRIBED)
            product = tl.dot(a.T, b, product, input_precision="ieee")
        if DESCRIBED and not ADD:
            target.store(
                [expert, m * BLOCK_M, n * BLOCK_N], tl.reshape(product.to(target.dtype), (1, BLOCK_M, BLOCK_N))
            )
        else:
            line = m * BLOCK_M + tl.arange(0, BLOCK_M)
            column = n * BLOCK_N + tl.arange(0, BLOCK_N)
            at = (expert.to(tl.int64) * height + line[:, None]) * width + column[None, :]
            mask = (line < height)[:, None] & (column < width)[None, :]
            if ADD:
                product += tl.load(target + at, mask=mask, other=0).to(tl.float32)
            tl.store(target + at, product.to(target.dtype.element_ty), mask=mask)


@triton.jit
def _bias_gradient(rows, weights, result, route_of_row, offsets, width, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    expert = tl.program_id(0)
    start = tl.load(offsets + expert)
    size = tl.load(offsets + expert + 1) - start
    column = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    total = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for row in range(0, size, BLOCK_R):
        value = load_group(rows, start, size, row, tl.program_id(1) * BLOCK_C, width, BLOCK_R, BLOCK_C, False)
        value = value.to(tl.float32)
        if weights is not None:
            place = row + tl.arange(0, BLOCK_R)
            route = tl.load(route_of_row + start + place, mask=place < size, other=0)
            value *= tl.load(weights + route)[:, None].to(tl.float32)
        total += value
    tl.store(result + expert * width + column, tl.sum(total, axis=0).to(result.dtype.element_ty), mask=column < width)
