"""Rows times the matrix of their expert: the down-projection, and both gradients that run along the rows."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from veomni_triton_moe.moe_experts.launch import Launch
from veomni_triton_moe.moe_experts.routing import Routing
from veomni_triton_moe.moe_experts.tiles import (
    described,
    described_rows,
    load_within,
    store_group,
    tile_position,
    tile_rows,
)
from veomni_triton_moe.multiprocessors import multiprocessors


def row_product(
    rows: Tensor,
    matrices: Tensor,
    routing: Routing,
    launch: Launch,
    use_descriptors: bool,
    bias: Tensor | None = None,
) -> Tensor:
    """``rows[N, A] @ matrices[E, A, B] (+ bias[E, B])``, each row with its expert's: ``[N, B]``, summed in float32.

    Either of the matrices' last two dimensions may be the contiguous one. Rows of dropped routes hold anything.
    """
    width, columns = matrices.shape[1:]
    result = rows.new_empty(rows.shape[0], columns)
    k_contiguous = matrices.stride(1) == 1
    source, weight, target = rows, matrices, result
    if use_descriptors:
        m, n, k = launch.block_m, launch.block_n, launch.block_k
        source, target = described(rows, [m, k]), described_rows(result, [m, n])
        weight = described(matrices.mT, [1, n, k]) if k_contiguous else described(matrices, [1, k, n])
    tiles = routing.max_tiles * triton.cdiv(columns, launch.block_n)
    _row_product[(min(multiprocessors(rows.device), tiles),)](
        source,
        weight,
        bias,
        target,
        routing.tiles,
        routing.offsets,
        routing.max_tiles,
        columns,
        width,
        *matrices.stride(),
        K_CONTIGUOUS=k_contiguous,
        DESCRIBED=use_descriptors,
        EVEN_K=width % launch.block_k == 0,
        BLOCK_M=launch.block_m,
        BLOCK_N=launch.block_n,
        BLOCK_K=launch.block_k,
        GROUP_M=launch.group_m,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )
    return result


@triton.jit(do_not_specialize=["max_tiles"])
def _row_product(
    source,
    weight,
    bias,
    target,
    tiles,
    offsets,
    max_tiles,
    columns,
    width,
    expert_stride,
    k_stride,
    n_stride,
    K_CONTIGUOUS: tl.constexpr,
    DESCRIBED: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    m_tiles = tl.load(tiles)
    n_tiles = tl.cdiv(columns, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    for tile in tl.range(tl.program_id(0), m_tiles * n_tiles, tl.num_programs(0), flatten=DESCRIBED):
        m, n = tile_position(tile, m_tiles, n_tiles, GROUP_M)
        expert, row, start, size = tile_rows(tiles, offsets, max_tiles, m)
        column = (n * BLOCK_N + tl.arange(0, BLOCK_N)) % columns
        if not DESCRIBED:
            rows = tl.minimum(row + tl.arange(0, BLOCK_M), start + size - 1)
            row_pointers = source + rows[:, None].to(tl.int64) * width + ks[None, :]
            weight_pointers = weight + expert.to(tl.int64) * expert_stride + column[None, :] * n_stride
            weight_pointers += ks[:, None] * k_stride
        product = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, width, BLOCK_K):
            if DESCRIBED:
                x = source.load([row, k])
                if K_CONTIGUOUS:
                    w = tl.reshape(weight.load([expert, n * BLOCK_N, k]), (BLOCK_N, BLOCK_K)).T
                else:
                    w = tl.reshape(weight.load([expert, k, n * BLOCK_N]), (BLOCK_K, BLOCK_N))
            else:
                x = load_within(row_pointers + k, ks[None, :], width - k, EVEN_K)
                w = load_within(weight_pointers + k * k_stride, ks[:, None], width - k, EVEN_K)
            product = tl.dot(x, w, product, input_precision="ieee")
        if bias is not None:
            product += tl.load(bias + expert * columns + column)[None, :].to(tl.float32)
        store_group(
            target, product, start, size, row - start, n * BLOCK_N, columns, columns, BLOCK_M, BLOCK_N, DESCRIBED
        )
