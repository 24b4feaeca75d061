"""The outputs of a chunk: ``since * C @ S.T + (C @ B.T * decays * steps) @ x + D * x``, with the state before it, S.

The product of C and B serves all heads of a group, and is computed once.

Shape legend: ``L`` tokens of a chunk, ``P`` columns of a head in a tile, ``N`` columns of a state in a tile.
"""

from __future__ import annotations

import triton.language as tl

from veomni_ops.triton_launches import triton_kernel
from veomni_triton.mamba2_scan.tiles import (
    NUMBERS,
    chunk_bounds,
    decays_since_start,
    load_numbers,
    load_state,
    load_tile,
    pairwise_decays,
    store_tile,
)


@triton_kernel(do_not_specialize=NUMBERS)
def scores_kernel(
    one,  # [B, S, G, STATE]
    other,  # [B, S, G, STATE]
    scores,  # [B, chunks, G, L, L] float32: one @ other.T
    one_token,
    one_group,
    other_token,
    other_group,
    length,
    chunks,
    groups,
    STATE: tl.constexpr,
    L: tl.constexpr,
    N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    place, group = tl.program_id(0) // groups, tl.program_id(0) % groups
    _row, _chunk, first, count = chunk_bounds(place, chunks, length, L)
    scores_LL = tl.zeros([L, L], tl.float32)
    for column in range(0, STATE, N):
        one_LN = load_tile(one + group * one_group, first, count, one_token, column, L, N, STATE)
        other_LN = load_tile(other + group * other_group, first, count, other_token, column, L, N, STATE)
        scores_LL += tl.dot(one_LN, tl.trans(other_LN), input_precision=PRECISION)
    own = tl.program_id(0).to(tl.int64) * L
    store_tile(scores + own * L, scores_LL, 0, L, L, 0, L, L, L)


@triton_kernel(do_not_specialize=NUMBERS)
def outputs_kernel(
    x,  # [B, S, H, WIDTH]
    C,  # [B, S, G, STATE]
    D,  # [H], or anything
    scores,  # of scores_kernel
    steps,  # of steps_kernel, as high, low and parts
    high,
    low,
    parts,
    before,  # of states_kernel
    out,  # [B, S, H, WIDTH] float32, contiguous
    x_token,
    x_head,
    c_token,
    c_group,
    length,
    chunks,
    heads,
    groups,
    HAS_D: tl.constexpr,
    PACKED: tl.constexpr,
    WIDTH: tl.constexpr,
    STATE: tl.constexpr,
    L: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    place, head, start = tl.program_id(0) // heads, tl.program_id(0) % heads, tl.program_id(1) * P
    group = head // (heads // groups)
    row, chunk, first, count = chunk_bounds(place, chunks, length, L)
    own = (row * heads + head).to(tl.int64) * chunks + chunk
    dtype = x.dtype.element_ty
    state = before + (place.to(tl.int64) * heads + head) * (WIDTH * STATE)
    out_LP = tl.zeros([L, P], tl.float32)
    for column in range(0, STATE, N):
        C_LN = load_tile(C + group * c_group, first, count, c_token, column, L, N, STATE)
        state_PN = load_state(state, start, column, P, N, WIDTH, STATE)
        out_LP += tl.dot(C_LN, tl.trans(state_PN), input_precision=PRECISION)
    out_LP *= decays_since_start(high, own, parts, place, PACKED, L)[:, None]
    weights_LL = load_tile(scores + (place.to(tl.int64) * groups + group) * (L * L), 0, L, L, 0, L, L, L)
    weights_LL *= pairwise_decays(high, low, own, parts, place, PACKED, L) * load_numbers(steps, own, L)[None, :]
    x_LP = load_tile(x + head * x_head, first, count, x_token, start, L, P, WIDTH)
    out_LP += tl.dot(weights_LL.to(dtype), x_LP, input_precision=PRECISION)
    if HAS_D:
        out_LP += x_LP.to(tl.float32) * tl.load(D + head).to(tl.float32)
    store_tile(out + head * WIDTH, out_LP, first, count, heads * WIDTH, start, L, P, WIDTH)
