"""Products with one dimension of an adapter's rank: passes over rows, which memory bounds.

Neither is persistent or loads through TMA, as the weights' products do: a program reads its rows once, and is over.
"""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from veomni_ops.sizes import ceil_div
from veomni_ops.triton_launches import triton_kernel
from veomni_triton_moe.moe_experts.factors import padded_rank, rank_block
from veomni_triton_moe.moe_experts.launch import NarrowLaunch, factor_launch, inner_launch
from veomni_triton_moe.moe_experts.routing import Routing
from veomni_triton_moe.moe_experts.tiles import load_within, tile_rows


def inner_product(
    rows: Tensor,
    matrices: Tensor,
    rank: int,
    routing: Routing,
    scaling: float,
    tokens_of_rows: bool = False,
    launch: NarrowLaunch | None = None,
) -> Tensor:
    """``scaling * rows[g] @ matrices[e]`` for the group ``g`` of each expert ``e``: ``[N, R]``, summed in float32.

    Args:
        rows: ``[N, A]``, contiguous; or with ``tokens_of_rows`` the tokens ``[T, A]``, contiguous along ``A``.
        matrices: ``[E, A, r]`` or ``[E, A, R]``, of any strides.
        rank: ``r``.
        routing: Which rows are whose, and which token each is.
        scaling: A factor, multiplied before the result is rounded.
        tokens_of_rows: Whether each row is to be gathered from the tokens.
        launch: Sizes of the blocks, instead of those of the dtype; the routing's tiles are whole numbers of its rows.

    Returns:
        ``[N, R]`` in rows' dtype, where ``R`` is ``r`` rounded up to whole blocks; zeros in the columns from ``r`` on.
        Rows of dropped routes are not written.
    """
    width, block = matrices.shape[1], rank_block(rank)
    inner = rows.new_empty(routing.routes, padded_rank(rank))
    launch = launch or inner_launch(rows.dtype)
    parts = routing.block_m // launch.rows
    # A program per block of rows, not persistent: all columns of a row are read once for ranks of up to 64.
    _inner_product[(routing.max_tiles * parts, inner.shape[1] // block)](
        rows,
        matrices,
        inner,
        routing.route_of_row if tokens_of_rows else None,
        routing.tiles,
        routing.offsets,
        routing.max_tiles,
        routing.k,
        width,
        rows.stride(0),
        *matrices.stride(),
        scaling,
        RANK=rank,
        EVEN_K=width % launch.columns == 0,
        PARTS=parts,
        BLOCK_M=launch.rows,
        BLOCK_K=launch.columns,
        BLOCK_R=block,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )
    return inner


def factor_gradient(
    rows: Tensor,
    inner: Tensor,
    columns: int,
    routing: Routing,
    weights: Tensor | None = None,
    tokens_of_rows: bool = False,
    transposed: bool = False,
    launch: NarrowLaunch | None = None,
) -> Tensor:
    """``rows[g].T @ inner[g]`` for the group ``g`` of each expert, summed in float32; a gradient of ``a`` or ``b``.

    Args:
        rows: ``[N, A]``, or with ``tokens_of_rows`` the tokens ``[T, A]``, as in :func:`inner_product`.
        inner: ``[N, R]``, contiguous.
        columns: The first columns of inner, which are multiplied.
        routing: Which rows are whose, and which token each is.
        weights: ``[T, K]``, contiguous: inner is multiplied by them first.
        tokens_of_rows: Whether each row is to be gathered from the tokens.
        transposed: Whether the result is stored as ``[E, columns, A]``.
        launch: Sizes of the blocks, instead of those of the dtype.

    Returns:
        ``[E, A, columns]`` or ``[E, columns, A]``, contiguous, in rows' dtype; zeros for experts without rows.
    """
    width, block = rows.shape[1], rank_block(columns)
    shape = (columns, width) if transposed else (width, columns)
    result = rows.new_empty(routing.experts, *shape)
    target = result.mT if transposed else result
    launch = launch or factor_launch(rows.dtype)
    _factor_gradient[(ceil_div(width, launch.columns), routing.experts, ceil_div(columns, block))](
        rows,
        inner,
        target,
        weights,
        routing.route_of_row,
        routing.offsets,
        routing.k,
        width,
        inner.shape[1],
        rows.stride(0),
        *target.stride(),
        COLUMNS=columns,
        TOKENS=tokens_of_rows,
        BLOCK_N=launch.columns,
        BLOCK_K=launch.rows,
        BLOCK_R=block,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )
    return result


# T tokens, K choices per token, N = T * K rows, sorted by expert; E experts; r the rank, R the rank in whole blocks of
# BLOCK_R. A is the width of the rows.


@triton_kernel(do_not_specialize=["max_tiles", "k_per_token"])
def _inner_product(
    source,  # [N, A], or [T, A] with route_of_row; rows source_stride apart
    matrices,  # [E, A, r], or more columns
    inner,  # [N, R], written
    route_of_row,  # [N], or None where source has a row for each route
    tiles,  # [1 + 2 * max_tiles]
    offsets,  # [E + 1]
    max_tiles,
    k_per_token,  # K
    width,  # A
    source_stride,
    expert_stride,  # of matrices, as the next two
    k_stride,
    rank_stride,
    scaling,
    RANK: tl.constexpr,
    EVEN_K: tl.constexpr,  # whether BLOCK_K divides A
    PARTS: tl.constexpr,  # of a tile, each BLOCK_M rows
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    # The grid has programs for every tile that there can be; the number of tiles is known here alone.
    if tl.program_id(0) // PARTS < tl.load(tiles):
        expert, row, start, size = tile_rows(tiles, offsets, max_tiles, tl.program_id(0) // PARTS)
        # Where a part has no rows, its tile's last row is read, and nothing is stored.
        rows = row + tl.program_id(0) % PARTS * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
        exists = rows < start + size
        ks = tl.arange(0, BLOCK_K)  # [BLOCK_K]
        rank = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)  # [BLOCK_R]
        # Rows beyond the group repeat its last, and columns beyond the rank its first: valid addresses.
        at = tl.minimum(rows, start + size - 1)  # [BLOCK_M]
        if route_of_row is not None:
            at = tl.load(route_of_row + at) // k_per_token
        # int64, since N * A and E * A * r can exceed 2**31.
        row_pointers = source + at[:, None].to(tl.int64) * source_stride + ks[None, :]  # [BLOCK_M, BLOCK_K]
        matrix_pointers = matrices + expert.to(tl.int64) * expert_stride + ks[:, None] * k_stride
        matrix_pointers += tl.where(rank < RANK, rank, 0)[None, :] * rank_stride  # [BLOCK_K, BLOCK_R]
        product = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)  # [BLOCK_M, BLOCK_R]
        for k in range(0, width, BLOCK_K):
            x = load_within(row_pointers + k, ks[None, :], width - k, EVEN_K)  # [BLOCK_M, BLOCK_K]
            w = load_within(matrix_pointers + k * k_stride, ks[:, None], width - k, EVEN_K)  # [BLOCK_K, BLOCK_R]
            product = tl.dot(x, w, product, input_precision="ieee")
        # Zeros beyond the rank: what reads inner multiplies whole blocks.
        product = tl.where((rank < RANK)[None, :], product * scaling, 0.0)
        pointers = inner + rows[:, None].to(tl.int64) * (tl.num_programs(1) * BLOCK_R) + rank[None, :]
        # Only rows of the group: the next ones are another program's.
        tl.store(pointers, product.to(inner.dtype.element_ty), mask=exists[:, None])


@triton_kernel(do_not_specialize=["k_per_token"])
def _factor_gradient(
    source,  # [N, A], or [T, A] if TOKENS; rows source_stride apart
    inner,  # [N, R]
    target,  # [E, A, COLUMNS], written
    weights,  # [T, K] or None
    route_of_row,  # [N]
    offsets,  # [E + 1]
    k_per_token,  # K
    width,  # A
    inner_stride,  # R
    source_stride,
    expert_stride,  # of target, as the next two
    column_stride,
    rank_stride,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,  # columns of source
    BLOCK_K: tl.constexpr,  # rows, which are reduced
    BLOCK_R: tl.constexpr,
):
    expert = tl.program_id(1)
    start = tl.load(offsets + expert)
    size = tl.load(offsets + expert + 1) - start
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    rank = tl.program_id(2) * BLOCK_R + tl.arange(0, BLOCK_R)  # [BLOCK_R]
    # Without rows the loop doesn't run, and the zeros are stored: the result is not initialised. One program reduces
    # all rows of its expert: no atomics, and so one order.
    product = tl.zeros((BLOCK_N, BLOCK_R), tl.float32)  # [BLOCK_N, BLOCK_R]
    for row in range(0, size, BLOCK_K):
        place = row + tl.arange(0, BLOCK_K)  # [BLOCK_K]
        exists = place < size
        # Zeros for rows beyond the group, in both operands: they are reduced. int64, since N * A can exceed 2**31.
        at = (start + place).to(tl.int64)  # [BLOCK_K]
        i = tl.load(inner + at[:, None] * inner_stride + rank[None, :], mask=exists[:, None], other=0.0)
        if TOKENS or weights is not None:
            route = tl.load(route_of_row + at, mask=exists, other=0)  # [BLOCK_K]
        if weights is not None:
            weight = tl.load(weights + route, mask=exists, other=0.0).to(tl.float32)  # [BLOCK_K]
            i = (i.to(tl.float32) * weight[:, None]).to(i.dtype)  # [BLOCK_K, BLOCK_R]
        if TOKENS:
            at = (route // k_per_token).to(tl.int64)
        # Columns beyond A wrap: valid addresses without a comparison per element; they are not stored.
        pointers = source + at[:, None] * source_stride + (column % width)[None, :]  # [BLOCK_K, BLOCK_N]
        x = tl.load(pointers, mask=exists[:, None], other=0.0)
        product = tl.dot(x.T, i, product, input_precision="ieee")
    # int64, since E * A * r can exceed 2**31.
    pointers = target + expert.to(tl.int64) * expert_stride + column[:, None] * column_stride
    mask = (column < width)[:, None] & (rank < COLUMNS)[None, :]
    tl.store(pointers + rank[None, :] * rank_stride, product.to(target.dtype.element_ty), mask=mask)
