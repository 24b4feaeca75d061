"""The up-projection: rows gathered from the tokens, gate and up in one product, and the activation on its result."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from veomni_triton_moe.moe_experts.activation import Activation, activate
from veomni_triton_moe.moe_experts.launch import Launch
from veomni_triton_moe.moe_experts.routing import Routing
from veomni_triton_moe.moe_experts.tiles import (
    described,
    described_rows,
    every_other,
    halves,
    load_within,
    store_group,
    tile_position,
    tile_rows,
)
from veomni_triton_moe.multiprocessors import multiprocessors


def gate_up_product(
    hidden: Tensor,
    gate_up_proj: Tensor,
    bias: Tensor | None,
    routing: Routing,
    activation: Activation,
    launch: Launch,
    use_descriptors: bool,
) -> tuple[Tensor, Tensor]:
    """Pre-activations ``[N, 2I]`` and activations ``[N, I]`` of ``hidden[T, H]`` and ``gate_up_proj[E, 2I, H]``.

    ``pre`` keeps the order of ``gate_up_proj``'s rows. Products are summed in float32; the activation is taken from
    the pre-activations as rounded to hidden's dtype, so that the backward sees the same.
    """
    width = hidden.shape[1]
    intermediate = gate_up_proj.shape[1] // 2
    pre = hidden.new_empty(routing.routes, 2 * intermediate)
    activated = hidden.new_empty(routing.routes, intermediate)
    operands: tuple[Any, ...] = (gate_up_proj, pre, pre if activation.interleaved else pre[:, intermediate:], activated)
    if use_descriptors:
        operands = _described(gate_up_proj, pre, activated, activation.interleaved, launch)
    tiles = routing.max_tiles * triton.cdiv(intermediate, launch.block_n)
    _gate_up[(min(multiprocessors(hidden.device), tiles),)](
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
        INTERLEAVED=activation.interleaved,
        DESCRIBED=use_descriptors,
        EVEN_K=width % launch.block_k == 0,
        BLOCK_M=launch.block_m,
        BLOCK_N=launch.block_n,
        BLOCK_K=launch.block_k,
        GROUP_M=launch.group_m,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        **activation.constants(),
    )
    return pre, activated


def _described(weight: Tensor, pre: Tensor, activated: Tensor, interleaved: bool, launch: Launch) -> tuple[Any, ...]:
    """The weight, the left and the right part of ``pre`` that one tile writes, and the activations."""
    half = weight.shape[1] // 2
    m, n, k = launch.block_m, launch.block_n, launch.block_k
    out = described_rows(activated, [m, n])
    if interleaved:
        whole = described_rows(pre, [m, n])
        return described(weight, [1, 2 * n, k]), whole, whole, out
    left, right = (described_rows(part, [m, n]) for part in pre.split(half, dim=1))
    return described(weight.unflatten(1, (2, half)), [1, 2, n, k]), left, right, out


@triton.jit(do_not_specialize=["max_tiles", "k_per_token"])
def _gate_up(
    hidden,
    weight,
    pre_left,
    pre_right,
    activated,
    bias,
    route_of_row,
    tiles,
    offsets,
    max_tiles,
    k_per_token,
    width,
    intermediate,
    hidden_stride,
    expert_stride,
    n_stride,
    k_stride,
    alpha,
    limit,
    up_offset,
    CLAMPED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    DESCRIBED: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    m_tiles = tl.load(tiles)
    n_tiles = tl.cdiv(intermediate, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    for tile in tl.range(tl.program_id(0), m_tiles * n_tiles, tl.num_programs(0), flatten=DESCRIBED):
        m, n = tile_position(tile, m_tiles, n_tiles, GROUP_M)
        expert, row, start, size = tile_rows(tiles, offsets, max_tiles, m)
        rows = row + tl.arange(0, BLOCK_M)
        token = tl.load(route_of_row + rows, mask=rows < start + size, other=0) // k_per_token
        hidden_pointers = hidden + token[:, None].to(tl.int64) * hidden_stride + ks[None, :]
        # The columns of one product: of gate and then of up, or of both in turn.
        both = tl.arange(0, 2 * BLOCK_N)
        if INTERLEAVED:
            column = n * 2 * BLOCK_N + both
            exists = column < 2 * intermediate
        else:
            place = n * BLOCK_N + both % BLOCK_N
            column = both // BLOCK_N * intermediate + place
            exists = place < intermediate
        weight_row = tl.where(exists, column, 0)
        if not DESCRIBED:
            weight_pointers = weight + expert.to(tl.int64) * expert_stride + weight_row[None, :] * n_stride
            weight_pointers += ks[:, None] * k_stride
        product = tl.zeros((BLOCK_M, 2 * BLOCK_N), tl.float32)
        for k in range(0, width, BLOCK_K):
            x = load_within(hidden_pointers + k, ks[None, :], width - k, EVEN_K)
            if DESCRIBED:
                if INTERLEAVED:
                    w = weight.load([expert, n * 2 * BLOCK_N, k])
                else:
                    w = weight.load([expert, 0, n * BLOCK_N, k])
                w = tl.reshape(w, (2 * BLOCK_N, BLOCK_K)).T
            else:
                w = load_within(weight_pointers + k * k_stride, ks[:, None], width - k, EVEN_K)
            product = tl.dot(x, w, product, input_precision="ieee")
        if bias is not None:
            product += tl.load(bias + expert * 2 * intermediate + weight_row)[None, :].to(tl.float32)
        product = product.to(hidden.dtype.element_ty)
        left, right = halves(product, BLOCK_M, 2 * BLOCK_N)
        if INTERLEAVED:
            gate, up = every_other(product, BLOCK_M, 2 * BLOCK_N)
            left_column, right_column, line = n * 2 * BLOCK_N, n * 2 * BLOCK_N + BLOCK_N, 2 * intermediate
        else:
            gate, up = left, right
            left_column, right_column, line = n * BLOCK_N, n * BLOCK_N, intermediate
        first = row - start
        store_group(
            pre_left, left, start, size, first, left_column, line, 2 * intermediate, BLOCK_M, BLOCK_N, DESCRIBED
        )
        store_group(
            pre_right, right, start, size, first, right_column, line, 2 * intermediate, BLOCK_M, BLOCK_N, DESCRIBED
        )
        value = activate(gate.to(tl.float32), up.to(tl.float32), alpha, limit, up_offset, CLAMPED)
        store_group(
            activated, value, start, size, first, n * BLOCK_N, intermediate, intermediate, BLOCK_M, BLOCK_N, DESCRIBED
        )
