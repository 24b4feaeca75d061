"""Rows times the matrix of their expert: the down-projection, and the gradients of activations and of hidden."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from veomni_ops.sizes import ceil_div
from veomni_ops.triton_descriptors import described, described_rows
from veomni_ops.triton_gpus import multiprocessors
from veomni_ops.triton_launches import triton_kernel
from veomni_triton_moe.moe_experts.adapters import Outer, add_outer, outer_arguments
from veomni_triton_moe.moe_experts.launch import Launch
from veomni_triton_moe.moe_experts.routing import Routing
from veomni_triton_moe.moe_experts.tiles import (
    load_within,
    store_group,
    tile_position,
    tile_rows,
)


def row_product(
    rows: Tensor,
    matrices: Tensor,
    routing: Routing,
    launch: Launch,
    use_descriptors: bool,
    bias: Tensor | None = None,
    outer: Outer | None = None,
    tokens_of_rows: bool = False,
) -> Tensor:
    """``rows[g] @ matrices[e] (+ bias[e])`` for the group ``g`` of each expert ``e``, summed in float32: ``[N, B]``.

    Args:
        rows: ``[N, A]``, contiguous; or with ``tokens_of_rows`` the tokens ``[T, A]``, likewise.
        matrices: ``[E, A, B]``; either of the last two dimensions may be the contiguous one.
        routing: Which rows are whose.
        launch: Sizes of the tiles; ``block_m`` is the routing's.
        use_descriptors: Whether to load and store through TMA descriptors.
        bias: ``[E, B]``, contiguous.
        outer: An adapter's part of the result, which is added before rounding.
        tokens_of_rows: Whether each row is to be gathered from the tokens.

    Returns:
        ``[N, B]`` in rows' dtype; rows of dropped routes are not written.
    """
    width, columns = matrices.shape[1:]
    result = rows.new_empty(routing.routes, columns)
    k_contiguous = matrices.stride(1) == 1
    source, weight, target = rows, matrices, result
    inner = factors = None
    if use_descriptors:
        m, n, k = launch.block_m, launch.block_n, launch.block_k
        # Only stores must stop at the group's end. Rows that a load takes from the next group are not stored.
        target = described_rows(result, (m, n))
        # Gathered rows are no block of the tokens: they are loaded through pointers.
        source = rows if tokens_of_rows else described(rows, (m, k))
        # TMA needs the last dimension contiguous: a matrix that lies the other way is loaded transposed.
        weight = described(matrices.mT, (1, n, k)) if k_contiguous else described(matrices, (1, k, n))
        if outer is not None:
            # Like source and weight, since the kernel's loop goes on over them.
            inner = None if tokens_of_rows else described(outer.inner, (m, k))
            factors = described(outer.lines(k_contiguous), (1, n, k) if k_contiguous else (1, k, n))
    adapter, rank = outer_arguments(outer, inner, factors)
    # An upper bound, since the number of tiles is on the device. A program takes every num_programs-th tile, so a
    # few programs per multiprocessor are enough, and one that finds no tile ends.
    tiles = routing.max_tiles * ceil_div(columns, launch.block_n)
    _row_product[(min(multiprocessors(rows.device) * launch.programs, tiles),)](
        source,
        weight,
        bias,
        target,
        routing.route_of_row if tokens_of_rows else None,
        routing.tiles,
        routing.offsets,
        routing.max_tiles,
        routing.k,
        columns,
        width,
        *matrices.stride(),
        *adapter,
        K_CONTIGUOUS=k_contiguous,
        DESCRIBED=use_descriptors,
        EVEN_K=width % launch.block_k == 0,
        BLOCK_M=launch.block_m,
        BLOCK_N=launch.block_n,
        BLOCK_K=launch.block_k,
        GROUP_M=launch.group_m,
        RANK=rank,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )
    return result


# N rows, one per route and sorted by expert; E experts; matrices [A, B]. A is the reduced dimension, indexed by k.
# max_tiles depends on the batch: if it were specialised, batches would recompile the kernel. A, B and the strides are
# the model's; specialised on divisibility by 16, they let Triton vectorise the loads.
@triton_kernel(do_not_specialize=["max_tiles", "k_per_token"])
def _row_product(
    source,  # [N, A], or a descriptor of it with blocks [BLOCK_M, BLOCK_K]; [T, A] with route_of_row
    weight,  # [E, A, B], or a descriptor with blocks [1, BLOCK_K, BLOCK_N], or [1, BLOCK_N, BLOCK_K] if K_CONTIGUOUS
    bias,  # [E, B] or None
    target,  # [N, B], or a ragged descriptor of it with blocks [BLOCK_M, BLOCK_N]; written
    route_of_row,  # [N], or None where source has a row for each route
    tiles,  # [1 + 2 * max_tiles]
    offsets,  # [E + 1]
    max_tiles,
    k_per_token,  # K
    columns,  # B
    width,  # A
    expert_stride,  # of weight, as the next two
    k_stride,
    n_stride,
    inner,  # [N, R], or None without an adapter
    inner_stride,
    factors,  # [E, RANK, B] or None
    factors_expert_stride,  # of factors, as the next two
    factors_rank_stride,
    factors_n_stride,
    K_CONTIGUOUS: tl.constexpr,  # whether k_stride is 1
    DESCRIBED: tl.constexpr,
    EVEN_K: tl.constexpr,  # whether BLOCK_K divides A
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    RANK: tl.constexpr,  # 0 without an adapter
):
    m_tiles = tl.load(tiles)
    n_tiles = tl.cdiv(columns, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)  # [BLOCK_K]
    # flatten merges the loops over tiles and over k into one, so that the pipeline loads a tile's first blocks while
    # the tile before it is finished and stored.
    for tile in tl.range(tl.program_id(0), m_tiles * n_tiles, tl.num_programs(0), flatten=DESCRIBED):
        m, n = tile_position(tile, m_tiles, n_tiles, GROUP_M)
        expert, row, start, size = tile_rows(tiles, offsets, max_tiles, m)
        # Columns beyond B wrap and rows beyond the group repeat its last: every address is valid without a mask, and
        # store_group drops what is computed of them.
        column = (n * BLOCK_N + tl.arange(0, BLOCK_N)) % columns  # [BLOCK_N]
        rows = tl.minimum(row + tl.arange(0, BLOCK_M), start + size - 1)  # [BLOCK_M]
        # int64 below where the product can exceed 2**31: N * A, and E * A * B.
        if route_of_row is not None:
            tokens = tl.load(route_of_row + rows) // k_per_token  # [BLOCK_M]
            row_pointers = source + tokens[:, None].to(tl.int64) * width + ks[None, :]  # [BLOCK_M, BLOCK_K]
            if RANK and DESCRIBED:
                inner_pointers = inner + rows[:, None].to(tl.int64) * inner_stride + ks[None, :]
        elif not DESCRIBED:
            row_pointers = source + rows[:, None].to(tl.int64) * width + ks[None, :]  # [BLOCK_M, BLOCK_K]
        if not DESCRIBED:
            weight_pointers = weight + expert.to(tl.int64) * expert_stride + column[None, :] * n_stride
            weight_pointers += ks[:, None] * k_stride  # [BLOCK_K, BLOCK_N]
        product = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)  # [BLOCK_M, BLOCK_N]
        # With descriptors, an adapter's ranks are further steps of this loop, which so are loaded ahead as well.
        ends = tl.cdiv(width, BLOCK_K) * BLOCK_K if RANK and DESCRIBED else width
        for step in range(0, ends + (RANK if DESCRIBED else 0), BLOCK_K):
            x_from, w_from, k = source, weight, step
            if RANK and DESCRIBED:
                is_outer = step >= ends
                if is_outer:
                    w_from, k = factors, step - ends
                if route_of_row is None:
                    if is_outer:
                        x_from = inner
                else:
                    pointers = tl.where(is_outer, inner_pointers, row_pointers) + k
                    x = tl.load(pointers, mask=ks[None, :] < tl.where(is_outer, RANK, width) - k, other=0.0)
            elif not DESCRIBED or route_of_row is not None:
                x = load_within(row_pointers + k, ks[None, :], width - k, EVEN_K)  # [BLOCK_M, BLOCK_K]
            if DESCRIBED and route_of_row is None:
                x = x_from.load([row, k])  # [BLOCK_M, BLOCK_K], with rows of the next group at a group's end
            if DESCRIBED:
                # Columns beyond A are zeros in both operands. .T changes only how the dot reads shared memory.
                if K_CONTIGUOUS:
                    w = tl.reshape(w_from.load([expert, n * BLOCK_N, k]), (BLOCK_N, BLOCK_K)).T
                else:
                    w = tl.reshape(w_from.load([expert, k, n * BLOCK_N]), (BLOCK_K, BLOCK_N))
            else:
                w = load_within(weight_pointers + k * k_stride, ks[:, None], width - k, EVEN_K)  # [BLOCK_K, BLOCK_N]
            # ieee: float32 operands are multiplied exactly, not as TF32; it changes nothing for 16-bit ones.
            product = tl.dot(x, w, product, input_precision="ieee")
        if RANK and not DESCRIBED:
            product = add_outer(
                product,
                inner,
                inner_stride,
                factors,
                rows,
                expert,
                column,
                factors_expert_stride,
                factors_rank_stride,
                factors_n_stride,
                RANK,
            )
        if bias is not None:
            # Before the result is rounded to 16 bits, so that it is rounded once.
            product += tl.load(bias + expert * columns + column)[None, :].to(tl.float32)
        store_group(
            target, product, start, size, row - start, n * BLOCK_N, columns, columns, BLOCK_M, BLOCK_N, DESCRIBED
        )
