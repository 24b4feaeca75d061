"""The state from chunk to chunk, and its gradient back: programs that walk over the chunks of one row of the batch.

A program has a tile of the state of one head. The steps depend on each other, so a step is one product.

Shape legend: ``L`` tokens of a chunk, ``P`` columns of a head in a tile, ``N`` columns of a state in a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from veomni_ops.triton_launches import triton_kernel
from veomni_triton.mamba2_scan.tiles import (
    NUMBERS,
    decay_over_chunk,
    decays_since_start,
    decays_to_end,
    load_numbers,
    load_state,
    load_tile,
    store_state,
)


@triton.jit
def _tile_of_program(heads, P: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr, STATE: tl.constexpr):
    """The row of the batch, the head, and the first row and column of the tile. Heads of a tile are neighbours."""
    across: tl.constexpr = (WIDTH + P - 1) // P
    program = tl.program_id(0)
    head, rest = program % heads, program // heads
    tiles: tl.constexpr = across * ((STATE + N - 1) // N)
    tile = rest % tiles
    return rest // tiles, head, tile % across * P, tile // across * N


@triton_kernel(do_not_specialize=NUMBERS)
def states_kernel(
    x,  # [B, S, H, WIDTH]
    B,  # [B, S, G, STATE]
    steps,  # of steps_kernel, as high, low and parts
    high,
    low,
    parts,
    initial,  # [B, H, WIDTH, STATE], or anything
    before,  # [B, chunks, H, WIDTH, STATE]: the state before each chunk
    final,  # [B, H, WIDTH, STATE] float32, or anything
    x_token,
    x_head,
    b_token,
    b_group,
    length,
    chunks,
    heads,
    groups,
    HAS_INITIAL: tl.constexpr,
    HAS_FINAL: tl.constexpr,
    PACKED: tl.constexpr,
    WIDTH: tl.constexpr,
    STATE: tl.constexpr,
    L: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    row, head, start, column = _tile_of_program(heads, P, N, WIDTH, STATE)
    own = (row * heads + head).to(tl.int64)
    if HAS_INITIAL:
        state_PN = load_state(initial + own * WIDTH * STATE, start, column, P, N, WIDTH, STATE).to(tl.float32)
    else:
        state_PN = tl.zeros([P, N], tl.float32)
    x += head * x_head
    B += head // (heads // groups) * b_group
    for chunk in range(0, chunks):
        place = row * chunks + chunk
        state = before + (place.to(tl.int64) * heads + head) * (WIDTH * STATE)
        store_state(state, state_PN, start, column, P, N, WIDTH, STATE)
        first, count = row * length + chunk * L, tl.minimum(length - chunk * L, L)
        x_LP = load_tile(x, first, count, x_token, start, L, P, WIDTH)
        B_LN = load_tile(B, first, count, b_token, column, L, N, STATE)
        factor_L = decays_to_end(high, low, own * chunks + chunk, parts, place, PACKED, L)
        factor_L *= load_numbers(steps, own * chunks + chunk, L)
        written_LP = (x_LP.to(tl.float32) * factor_L[:, None]).to(x.dtype.element_ty)
        state_PN *= decay_over_chunk(high, own * chunks + chunk, parts, place, PACKED, L)
        state_PN += tl.dot(tl.trans(written_LP), B_LN, input_precision=PRECISION)
    if HAS_FINAL:
        store_state(final + own * WIDTH * STATE, state_PN, start, column, P, N, WIDTH, STATE)


@triton_kernel(do_not_specialize=NUMBERS)
def state_gradients_kernel(
    dout,  # [B, S, H, WIDTH]
    C,  # [B, S, G, STATE]
    high,  # of steps_kernel, as parts
    parts,
    dfinal,  # [B, H, WIDTH, STATE] float32, or anything
    dafter,  # [B, chunks, H, WIDTH, STATE]: the gradient of the state after each chunk
    dinitial,  # [B, H, WIDTH, STATE], or anything
    dout_token,
    dout_head,
    c_token,
    c_group,
    length,
    chunks,
    heads,
    groups,
    HAS_FINAL: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    PACKED: tl.constexpr,
    WIDTH: tl.constexpr,
    STATE: tl.constexpr,
    L: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    row, head, start, column = _tile_of_program(heads, P, N, WIDTH, STATE)
    own = (row * heads + head).to(tl.int64)
    if HAS_FINAL:
        dstate_PN = load_state(dfinal + own * WIDTH * STATE, start, column, P, N, WIDTH, STATE).to(tl.float32)
    else:
        dstate_PN = tl.zeros([P, N], tl.float32)
    dout += head * dout_head
    C += head // (heads // groups) * c_group
    for back in range(0, chunks):
        chunk = chunks - 1 - back
        place = row * chunks + chunk
        dstate = dafter + (place.to(tl.int64) * heads + head) * (WIDTH * STATE)
        store_state(dstate, dstate_PN, start, column, P, N, WIDTH, STATE)
        first, count = row * length + chunk * L, tl.minimum(length - chunk * L, L)
        dout_LP = load_tile(dout, first, count, dout_token, start, L, P, WIDTH)
        C_LN = load_tile(C, first, count, c_token, column, L, N, STATE)
        since_L = decays_since_start(high, own * chunks + chunk, parts, place, PACKED, L)
        dread_LP = (dout_LP.to(tl.float32) * since_L[:, None]).to(C.dtype.element_ty)
        dstate_PN *= decay_over_chunk(high, own * chunks + chunk, parts, place, PACKED, L)
        dstate_PN += tl.dot(tl.trans(dread_LP), C_LN, input_precision=PRECISION)
    if HAS_INITIAL:
        store_state(dinitial + own * WIDTH * STATE, dstate_PN, start, column, P, N, WIDTH, STATE)
