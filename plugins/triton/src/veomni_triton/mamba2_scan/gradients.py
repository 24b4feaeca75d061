"""The gradients of a chunk's inputs, once the states before chunks and the gradients of those after them are known.

Heads of a group share B and C. A program takes some of them, one after the other, and adds up what they have of the
gradients of B, of C and of their product; the last kernel adds what the programs have. The order is always the same.

What decays gain is taken from one float32 matrix of pairs of tokens, its row sums less its column sums: what is of no
decay cancels, and no difference of two rounded results is left of it. For float32 inputs these are sums in float64,
since theirs would leave as much as a gradient that is small beside its terms.

Shape legend: ``L`` tokens of a chunk, ``P`` columns of a head in a tile, ``N`` columns of a state in a tile.
"""

from __future__ import annotations

import triton.language as tl

from veomni_ops.triton_launches import triton_kernel
from veomni_triton.mamba2_scan.tiles import (
    NUMBERS,
    chunk_bounds,
    decays_since_start,
    decays_to_end,
    load_numbers,
    load_state,
    load_tile,
    pairwise_decays_from,
    store_numbers,
    store_tile,
)


@triton_kernel(do_not_specialize=NUMBERS)
def pair_gradients_kernel(
    x,  # [B, S, H, WIDTH]
    B,  # [B, S, G, STATE]
    D,  # [H], or anything
    dout,  # [B, S, H, WIDTH]
    scores,  # of scores_kernel: B @ C.T
    steps,  # of steps_kernel, as high, low and parts
    high,
    low,
    parts,
    dafter,  # of state_gradients_kernel
    dx,  # [B, S, H, WIDTH], contiguous
    dD,  # [B * chunks, H] float32: what is to be added up, or anything
    dscores,  # [B, chunks, G, slices, L, L] float32: what a slice of the heads has
    step_known,  # [B, H, chunks, L] float32: the gradients of time steps, but by what these decay
    written,  # [B, H, chunks, L] float32: the part of that by the state after the chunk
    pairs,  # [B, H, chunks, L]: the gradients of the summed log-decays by the chunk's own pairs of tokens
    x_token,
    x_head,
    b_token,
    b_group,
    dout_token,
    dout_head,
    length,
    chunks,
    heads,
    groups,
    SLICE: tl.constexpr,
    HAS_D: tl.constexpr,
    PACKED: tl.constexpr,
    WIDTH: tl.constexpr,
    STATE: tl.constexpr,
    L: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    slices = heads // SLICE
    place, piece = tl.program_id(0) // slices, tl.program_id(0) % slices
    group = piece * SLICE // (heads // groups)
    row, chunk, first, count = chunk_bounds(place, chunks, length, L)
    dtype = x.dtype.element_ty
    token_L = tl.arange(0, L)
    B += group * b_group
    dscores_LL = tl.zeros([L, L], tl.float32)
    for offset in range(0, SLICE):
        head = piece * SLICE + offset
        own = (row * heads + head).to(tl.int64) * chunks + chunk
        step_L = load_numbers(steps, own, L)
        # All pairs are of token j, which writes, and i, which reads: [j, i]
        products_LL = tl.zeros([L, L], tl.float32)
        skipped = 0.0
        for start in range(0, WIDTH, P):
            x_LP = load_tile(x + head * x_head, first, count, x_token, start, L, P, WIDTH)
            dout_LP = load_tile(dout + head * dout_head, first, count, dout_token, start, L, P, WIDTH).to(tl.float32)
            products_LL += tl.dot(x_LP, tl.trans(dout_LP.to(dtype)), input_precision=PRECISION)
            if HAS_D:
                skipped += tl.sum(tl.sum(dout_LP * x_LP.to(tl.float32), axis=1), axis=0)
        if HAS_D:
            tl.store(dD + place.to(tl.int64) * heads + head, skipped)
        decays_LL = pairwise_decays_from(high, low, own, parts, place, PACKED, L)
        dscores_LL += products_LL * decays_LL * step_L[:, None]
        scores_LL = load_tile(scores + (place.to(tl.int64) * groups + group) * (L * L), 0, L, L, 0, L, L, L)
        decays_LL *= scores_LL
        weights_LL = decays_LL.to(dtype)
        products_LL *= decays_LL
        known_L = tl.sum(products_LL, axis=1)
        products_LL = tl.where(token_L[:, None] < token_L[None, :], products_LL * step_L[:, None], 0.0)
        exact_LL = products_LL.to(pairs.dtype.element_ty)
        store_numbers(pairs, tl.sum(exact_LL, axis=0) - tl.sum(exact_LL, axis=1), own, L)
        to_end_L = decays_to_end(high, low, own, parts, place, PACKED, L)
        written_L = tl.zeros([L], tl.float32)
        state = dafter + (place.to(tl.int64) * heads + head) * (WIDTH * STATE)
        for start in range(0, WIDTH, P):
            dx_LP = tl.zeros([L, P], tl.float32)
            for column in range(0, STATE, N):
                B_LN = load_tile(B, first, count, b_token, column, L, N, STATE)
                dstate_PN = load_state(state, start, column, P, N, WIDTH, STATE)
                dx_LP += tl.dot(B_LN, tl.trans(dstate_PN), input_precision=PRECISION)
            dx_LP *= to_end_L[:, None]
            x_LP = load_tile(x + head * x_head, first, count, x_token, start, L, P, WIDTH)
            written_L += tl.sum(dx_LP * x_LP.to(tl.float32), axis=1)
            dout_LP = load_tile(dout + head * dout_head, first, count, dout_token, start, L, P, WIDTH)
            dx_LP += tl.dot(weights_LL, dout_LP.to(dtype), input_precision=PRECISION)
            dx_LP *= step_L[:, None]
            if HAS_D:
                dx_LP += dout_LP.to(tl.float32) * tl.load(D + head).to(tl.float32)
            store_tile(dx + head * WIDTH, dx_LP, first, count, heads * WIDTH, start, L, P, WIDTH)
        store_numbers(written, written_L, own, L)
        store_numbers(step_known, known_L + written_L, own, L)
    store_tile(dscores + tl.program_id(0).to(tl.int64) * (L * L), dscores_LL, 0, L, L, 0, L, L, L)


@triton_kernel(do_not_specialize=NUMBERS)
def product_gradients_kernel(
    x,  # [B, S, H, WIDTH]
    C,  # [B, S, G, STATE]
    dout,  # [B, S, H, WIDTH]
    steps,  # of steps_kernel, as high, low and parts
    high,
    low,
    parts,
    before,  # of states_kernel
    dafter,  # of state_gradients_kernel
    dB,  # [B, chunks, G, slices, L, STATE] float32: what a slice of the heads has from the state after the chunk
    dC,  # the same from the state before the chunk
    read,  # [tiles, B, H, chunks, L] float32: the gradients of the summed log-decays by the state before the chunk
    over,  # [tiles, B, H, chunks] float32: the state before the chunk times the gradient of that after it
    x_token,
    x_head,
    c_token,
    c_group,
    dout_token,
    dout_head,
    length,
    chunks,
    heads,
    groups,
    SLICE: tl.constexpr,
    PACKED: tl.constexpr,
    WIDTH: tl.constexpr,
    STATE: tl.constexpr,
    L: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    slices = heads // SLICE
    place, piece = tl.program_id(0) // slices, tl.program_id(0) % slices
    column = tl.program_id(1) * N
    group = piece * SLICE // (heads // groups)
    row, chunk, first, count = chunk_bounds(place, chunks, length, L)
    dtype = x.dtype.element_ty
    dB_LN, dC_LN = tl.zeros([L, N], tl.float32), tl.zeros([L, N], tl.float32)
    # Where the numbers of this tile's columns go
    tile = tl.program_id(1).to(tl.int64) * (tl.num_programs(0) // slices * heads)
    for offset in range(0, SLICE):
        head = piece * SLICE + offset
        own = (row * heads + head).to(tl.int64) * chunks + chunk
        state = (place.to(tl.int64) * heads + head) * (WIDTH * STATE)
        factor_L = decays_to_end(high, low, own, parts, place, PACKED, L) * load_numbers(steps, own, L)
        read_LN = tl.zeros([L, N], tl.float32)
        product = 0.0
        for start in range(0, WIDTH, P):
            x_LP = load_tile(x + head * x_head, first, count, x_token, start, L, P, WIDTH)
            written_LP = (x_LP.to(tl.float32) * factor_L[:, None]).to(dtype)
            dafter_PN = load_state(dafter + state, start, column, P, N, WIDTH, STATE)
            dB_LN = tl.dot(written_LP, dafter_PN, dB_LN, input_precision=PRECISION)
            dout_LP = load_tile(dout + head * dout_head, first, count, dout_token, start, L, P, WIDTH)
            before_PN = load_state(before + state, start, column, P, N, WIDTH, STATE)
            read_LN += tl.dot(dout_LP.to(dtype), before_PN, input_precision=PRECISION)
            product += tl.sum(tl.sum(before_PN.to(tl.float32) * dafter_PN.to(tl.float32), axis=1), axis=0)
        read_LN *= decays_since_start(high, own, parts, place, PACKED, L)[:, None]
        dC_LN += read_LN
        C_LN = load_tile(C + group * c_group, first, count, c_token, column, L, N, STATE)
        store_numbers(read, tl.sum(read_LN * C_LN.to(tl.float32), axis=1), tile + own, L)
        tl.store(over + tile + own, product)
    part = tl.program_id(0).to(tl.int64) * (L * STATE)
    store_tile(dB + part, dB_LN, 0, L, STATE, column, L, N, STATE)
    store_tile(dC + part, dC_LN, 0, L, STATE, column, L, N, STATE)


@triton_kernel(do_not_specialize=(*NUMBERS, "slices", "state_slices"))
def shared_gradients_kernel(
    B,  # [B, S, G, STATE]
    C,  # [B, S, G, STATE]
    dscores,  # of pair_gradients_kernel
    written,  # dB of product_gradients_kernel
    read,  # dC of product_gradients_kernel
    dB,  # [B, S, G, STATE], contiguous
    dC,  # [B, S, G, STATE], contiguous
    b_token,
    b_group,
    c_token,
    c_group,
    length,
    chunks,
    groups,
    slices,  # of a group in dscores
    state_slices,  # of a group in written and read
    STATE: tl.constexpr,
    L: tl.constexpr,
    N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    place, group, column = tl.program_id(0) // groups, tl.program_id(0) % groups, tl.program_id(1) * N
    _row, _chunk, first, count = chunk_bounds(place, chunks, length, L)
    own = tl.program_id(0).to(tl.int64)
    dscores_LL = tl.zeros([L, L], tl.float32)
    for piece in range(0, slices):
        dscores_LL += load_tile(dscores + (own * slices + piece) * (L * L), 0, L, L, 0, L, L, L)
    dB_LN, dC_LN = tl.zeros([L, N], tl.float32), tl.zeros([L, N], tl.float32)
    for piece in range(0, state_slices):
        part = (own * state_slices + piece) * (L * STATE)
        dB_LN += load_tile(written + part, 0, L, STATE, column, L, N, STATE)
        dC_LN += load_tile(read + part, 0, L, STATE, column, L, N, STATE)
    rounded_LL = dscores_LL.to(B.dtype.element_ty)
    C_LN = load_tile(C + group * c_group, first, count, c_token, column, L, N, STATE)
    dB_LN += tl.dot(rounded_LL, C_LN, input_precision=PRECISION)
    B_LN = load_tile(B + group * b_group, first, count, b_token, column, L, N, STATE)
    dC_LN += tl.dot(tl.trans(rounded_LL), B_LN, input_precision=PRECISION)
    store_tile(dB + group * STATE, dB_LN, first, count, groups * STATE, column, L, N, STATE)
    store_tile(dC + group * STATE, dC_LN, first, count, groups * STATE, column, L, N, STATE)
