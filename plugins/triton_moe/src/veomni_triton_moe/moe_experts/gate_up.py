"""The gate and up projections in one product: rows gathered from the tokens, and the activation in the epilogue."""

from __future__ import annotations

from typing import Any

import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from veomni_ops.sizes import ceil_div
from veomni_ops.triton_descriptors import described, described_rows
from veomni_ops.triton_gpus import multiprocessors
from veomni_ops.triton_launches import triton_kernel
from veomni_triton_moe.moe_experts.activation import Activation, activate
from veomni_triton_moe.moe_experts.adapters import Outer, add_outer, outer_arguments
from veomni_triton_moe.moe_experts.launch import Launch
from veomni_triton_moe.moe_experts.routing import Routing
from veomni_triton_moe.moe_experts.tiles import (
    every_other,
    halves,
    load_within,
    store_group,
    tile_position,
    tile_rows,
)


def gate_up_product(
    hidden: Tensor,
    gate_up_proj: Tensor,
    bias: Tensor | None,
    routing: Routing,
    activation: Activation,
    launch: Launch,
    use_descriptors: bool,
    outer: Outer | None = None,
) -> tuple[Tensor, Tensor]:
    """Pre-activations and activations of every route.

    Products are summed in float32. The activation is computed from the pre-activations as rounded to hidden's dtype,
    which are what backward gets.

    Args:
        hidden: ``[T, H]``, contiguous along ``H``.
        gate_up_proj: ``[E, 2I, H]``, of any strides.
        bias: ``[E, 2I]``, contiguous, or ``None``.
        routing: Which rows are whose, and which token each is.
        activation: The activation, and whether gate and up are halves of ``2I`` or every other one.
        launch: Sizes of the tiles; ``block_m`` is the routing's.
        use_descriptors: Whether to load weights and store results through TMA descriptors.
        outer: An adapter's part of the pre-activations, which is added before rounding.

    Returns:
        ``pre[N, 2I]`` in the order of ``gate_up_proj``'s rows, and ``activated[N, I]``. Rows of dropped routes are not
        written.
    """
    width = hidden.shape[1]
    intermediate = gate_up_proj.shape[1] // 2
    pre = hidden.new_empty(routing.routes, 2 * intermediate)
    activated = hidden.new_empty(routing.routes, intermediate)
    # Each tile stores pre in two parts of BLOCK_N columns: gate and up, or the left and right half where interleaved.
    operands: tuple[Any, ...] = (gate_up_proj, pre, pre if activation.interleaved else pre[:, intermediate:], activated)
    factors = None
    if use_descriptors:
        operands = _described(gate_up_proj, pre, activated, activation.interleaved, launch)
        if outer is not None:
            factors = _described_weight(outer.lines(True), activation.interleaved, launch)
    adapter, rank = outer_arguments(outer, factors=factors)
    # An upper bound, since the number of tiles is on the device; a few programs per multiprocessor go through them.
    tiles = routing.max_tiles * ceil_div(intermediate, launch.block_n)
    _gate_up[(min(multiprocessors(hidden.device) * launch.programs, tiles),)](
        hidden,
        *operands,
        bias,
        routing.route_of_row,
        routing.tiles,
        routing.offsets,
        routing.max_tiles,
        routing.k,
        width,
        intermediate,
        hidden.stride(0),
        *gate_up_proj.stride(),
        *activation.parameters(),
        *adapter,
        CLAMPED=activation.limit is not None,
        INTERLEAVED=activation.interleaved,
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
    return pre, activated


def _described(weight: Tensor, pre: Tensor, activated: Tensor, interleaved: bool, launch: Launch) -> tuple[Any, ...]:
    """Descriptors of the weight, of both parts of ``pre`` that one tile stores, and of the activations.

    The weight's block is gate and up of one tile, so that one load brings both: ``2 * block_n`` adjacent rows where
    they are interleaved, else ``block_n`` rows of either half, from the view ``[E, 2, I, H]``.
    """
    m, n = launch.block_m, launch.block_n
    out, described_weight = described_rows(activated, (m, n)), _described_weight(weight, interleaved, launch)
    if interleaved:
        # Stored in two parts here too: one block of 2 * block_n columns would not fit shared memory.
        whole = described_rows(pre, (m, n))
        return described_weight, whole, whole, out
    # Each half is bounded by its own width: with one descriptor, gate's last tile would write into up's first columns.
    left, right = (described_rows(part, (m, n)) for part in pre.chunk(2, dim=1))
    return described_weight, left, right, out


def _described_weight(weight: Tensor, interleaved: bool, launch: Launch) -> TensorDescriptor:
    """A descriptor of ``weight[E, 2I, …]``, whose block is gate and up of one tile."""
    n, k = launch.block_n, launch.block_k
    if interleaved:
        return described(weight, (1, 2 * n, k))
    return described(weight.unflatten(1, (2, weight.shape[1] // 2)), (1, 2, n, k))


# T tokens, N rows, one per route and sorted by expert; E experts, H hidden, I intermediate. A tile is BLOCK_M rows by
# BLOCK_N columns of gate and the same columns of up, so its accumulator has 2 * BLOCK_N. H is reduced, indexed by k.
# max_tiles depends on the batch: if it were specialised, batches would recompile the kernel.
@triton_kernel(do_not_specialize=["max_tiles", "k_per_token"])
def _gate_up(
    hidden,  # [T, H], rows hidden_stride apart; always a pointer, since a tile's tokens are scattered
    weight,  # [E, 2I, H], or a descriptor: blocks [1, 2, BLOCK_N, BLOCK_K], if INTERLEAVED [1, 2 * BLOCK_N, BLOCK_K]
    pre_left,  # [N, 2I], or a ragged descriptor of gate's half, or of the whole if INTERLEAVED; written
    pre_right,  # pre from up's half on, or from its beginning if INTERLEAVED; or a ragged descriptor; written
    activated,  # [N, I], or a ragged descriptor of it; written
    bias,  # [E, 2I] or None
    route_of_row,  # [N]
    tiles,  # [1 + 2 * max_tiles]
    offsets,  # [E + 1]
    max_tiles,
    k_per_token,  # K
    width,  # H
    intermediate,  # I
    hidden_stride,
    expert_stride,  # of weight, as the next two
    n_stride,
    k_stride,
    alpha,
    limit,
    up_offset,
    inner,  # [N, R], or None without an adapter
    inner_stride,
    factors,  # [E, RANK, 2I] or None
    factors_expert_stride,  # of factors, as the next two
    factors_rank_stride,
    factors_n_stride,
    CLAMPED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    DESCRIBED: tl.constexpr,
    EVEN_K: tl.constexpr,  # whether BLOCK_K divides H
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    RANK: tl.constexpr,  # 0 without an adapter
):
    m_tiles = tl.load(tiles)
    n_tiles = tl.cdiv(intermediate, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)  # [BLOCK_K]
    # flatten merges the loops over tiles and over k into one, so that the pipeline loads a tile's first blocks while
    # the tile before it is activated and stored.
    for tile in tl.range(tl.program_id(0), m_tiles * n_tiles, tl.num_programs(0), flatten=DESCRIBED):
        m, n = tile_position(tile, m_tiles, n_tiles, GROUP_M)
        expert, row, start, size = tile_rows(tiles, offsets, max_tiles, m)
        rows = row + tl.arange(0, BLOCK_M)  # [BLOCK_M]
        # Rows beyond the group read token 0, whatever is there: store_group drops them, so no mask is needed below.
        token = tl.load(route_of_row + rows, mask=rows < start + size, other=0) // k_per_token
        hidden_pointers = hidden + token[:, None].to(tl.int64) * hidden_stride + ks[None, :]  # [BLOCK_M, BLOCK_K]
        if RANK:
            # Rows beyond the group repeat its last.
            inner_rows = tl.minimum(rows, start + size - 1)  # [BLOCK_M]
            inner_pointers = inner + inner_rows[:, None].to(tl.int64) * inner_stride + ks[None, :]
        # The product's columns, as rows of gate_up_proj: BLOCK_N of gate and then as many of up, or both alternating.
        both = tl.arange(0, 2 * BLOCK_N)  # [2 * BLOCK_N], as the next four
        if INTERLEAVED:
            column = n * 2 * BLOCK_N + both
            exists = column < 2 * intermediate
        else:
            place = n * BLOCK_N + both % BLOCK_N
            column = both // BLOCK_N * intermediate + place
            # By the column within its half: gate's columns beyond I are no columns of up.
            exists = place < intermediate
        # Columns that don't exist read row 0, a valid address; they are dropped when stored.
        weight_row = tl.where(exists, column, 0)
        if not DESCRIBED:
            # int64, since E * 2I * H can exceed 2**31. [BLOCK_K, 2 * BLOCK_N]
            weight_pointers = weight + expert.to(tl.int64) * expert_stride + weight_row[None, :] * n_stride
            weight_pointers += ks[:, None] * k_stride
        product = tl.zeros((BLOCK_M, 2 * BLOCK_N), tl.float32)  # [BLOCK_M, 2 * BLOCK_N]
        # With descriptors, an adapter's ranks are further steps of this loop, which so are loaded ahead as well.
        ends = tl.cdiv(width, BLOCK_K) * BLOCK_K if RANK and DESCRIBED else width
        for step in range(0, ends + (RANK if DESCRIBED else 0), BLOCK_K):
            w_from, k = weight, step
            if RANK and DESCRIBED:
                is_outer = step >= ends
                if is_outer:
                    w_from, k = factors, step - ends
                pointers = tl.where(is_outer, inner_pointers, hidden_pointers) + k  # [BLOCK_M, BLOCK_K]
                x = tl.load(pointers, mask=ks[None, :] < tl.where(is_outer, RANK, width) - k, other=0.0)
            else:
                x = load_within(hidden_pointers + k, ks[None, :], width - k, EVEN_K)  # [BLOCK_M, BLOCK_K]
            if DESCRIBED:
                # Either block is 2 * BLOCK_N rows in the order of `both`; .T changes only how the dot reads it.
                if INTERLEAVED:
                    w = w_from.load([expert, n * 2 * BLOCK_N, k])
                else:
                    w = w_from.load([expert, 0, n * BLOCK_N, k])
                w = tl.reshape(w, (2 * BLOCK_N, BLOCK_K)).T
            else:
                w = load_within(weight_pointers + k * k_stride, ks[:, None], width - k, EVEN_K)
            # w is [BLOCK_K, 2 * BLOCK_N] either way.
            # ieee: float32 operands are multiplied exactly, not as TF32; it changes nothing for 16-bit ones.
            product = tl.dot(x, w, product, input_precision="ieee")
        if RANK and not DESCRIBED:
            product = add_outer(
                product,
                inner,
                inner_stride,
                factors,
                inner_rows,
                expert,
                weight_row,
                factors_expert_stride,
                factors_rank_stride,
                factors_n_stride,
                RANK,
            )
        if bias is not None:
            product += tl.load(bias + expert * 2 * intermediate + weight_row)[None, :].to(tl.float32)
        # Rounded before the activation, not only for the store: backward computes it from the stored values.
        product = product.to(hidden.dtype.element_ty)
        left, right = halves(product, BLOCK_M, 2 * BLOCK_N)  # [BLOCK_M, BLOCK_N] each, adjacent columns of pre
        # `line`: the columns that a part of pre may be written in, counted from where its target begins.
        if INTERLEAVED:
            gate, up = every_other(product, BLOCK_M, 2 * BLOCK_N)
            left_column, right_column, line = n * 2 * BLOCK_N, n * 2 * BLOCK_N + BLOCK_N, 2 * intermediate
        else:
            gate, up = left, right
            # The same column twice, since the targets begin I columns apart.
            left_column, right_column, line = n * BLOCK_N, n * BLOCK_N, intermediate
        first = row - start  # the tile's first row, counted within its group
        store_group(
            pre_left, left, start, size, first, left_column, line, 2 * intermediate, BLOCK_M, BLOCK_N, DESCRIBED
        )
        store_group(
            pre_right, right, start, size, first, right_column, line, 2 * intermediate, BLOCK_M, BLOCK_N, DESCRIBED
        )
        # [BLOCK_M, BLOCK_N]; in float32, rounded once by store_group.
        value = activate(gate.to(tl.float32), up.to(tl.float32), alpha, limit, up_offset, CLAMPED)
        store_group(
            activated, value, start, size, first, n * BLOCK_N, intermediate, intermediate, BLOCK_M, BLOCK_N, DESCRIBED
        )
