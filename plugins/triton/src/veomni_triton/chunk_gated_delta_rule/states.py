"""The state from chunk to chunk, and its gradient back: programs that walk over the chunks of one sequence.

A program has all keys and a few columns of the values of one value head. The steps depend on each other, so a step is
kept short: what does not need the state was computed before, by programs that run side by side.

Shape legend: ``C`` tokens of a chunk, ``K`` key width, ``V`` columns of the values in a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from veomni_ops.triton_launches import triton_kernel
from veomni_triton.chunk_gated_delta_rule.tiles import (
    NUMBERS,
    ROWS_OF_NUMBERS,
    indices,
    load_numbers,
    load_tile,
    store_tile,
)


@triton.jit
def load_state(states, start, key_width, value_width, K: tl.constexpr, V: tl.constexpr):
    """``[K, V]`` of one state ``[key_width, value_width]``, its columns from ``start``."""
    row_K, column_V = tl.arange(0, K), start + tl.arange(0, V)
    inside_KV = (row_K < key_width)[:, None] & (column_V < value_width)[None, :]
    return tl.load(states + row_K[:, None] * value_width + column_V[None, :], mask=inside_KV, other=0.0)


@triton.jit
def store_state(states, state_KV, start, key_width, value_width, K: tl.constexpr, V: tl.constexpr):
    """Write what :func:`load_state` reads."""
    row_K, column_V = tl.arange(0, K), start + tl.arange(0, V)
    inside_KV = (row_K < key_width)[:, None] & (column_V < value_width)[None, :]
    place_KV = states + row_K[:, None] * value_width + column_V[None, :]
    tl.store(place_KV, state_KV.to(states.dtype.element_ty), mask=inside_KV)


@triton_kernel(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=ROWS_OF_NUMBERS)
def states_kernel(
    k,  # [tokens, H, key_width]
    w,  # [tokens, HV, key_width]
    x,  # [tokens, HV, value_width]: u on entry, the corrections on return
    write_scale,  # [tokens, HV] float32
    left,  # [chunks, HV] float32
    chunks,  # [chunks, 2]: first token, number of tokens
    spans,  # [sequences, 2]: first chunk, and the one after the last
    initial,  # [sequences, HV, key_width, value_width], or anything
    before,  # [chunks, HV, key_width, value_width]: the state before each chunk
    final,  # [sequences, HV, key_width, value_width] float32, or anything
    k_token,
    k_head,
    key_width,
    value_width,
    value_heads,
    group,  # value heads of a key head
    HAS_INITIAL: tl.constexpr,
    HAS_FINAL: tl.constexpr,
    C: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tile, head, sequence = indices(tl.cdiv(value_width, V), value_heads)
    start = tile * V
    dtype = x.dtype.element_ty
    size = tl.cast(key_width * value_width, tl.int64)  # widths of 1 are constants, which have no `to`
    own = (sequence * value_heads + head) * size
    if HAS_INITIAL:
        state_KV = load_state(initial + own, start, key_width, value_width, K, V).to(tl.float32)
    else:
        state_KV = tl.zeros([K, V], tl.float32)
    for chunk in range(tl.load(spans + 2 * sequence), tl.load(spans + 2 * sequence + 1)):
        first, count = tl.load(chunks + 2 * chunk), tl.load(chunks + 2 * chunk + 1)
        state = before + (chunk * value_heads + head) * size
        rounded_KV = state_KV.to(dtype)
        store_state(state, rounded_KV, start, key_width, value_width, K, V)
        w_CK = load_tile(w + head * key_width, first, count, value_heads * key_width, 0, key_width, C, K)
        u_CV = load_tile(x + head * value_width, first, count, value_heads * value_width, start, value_width, C, V)
        x_CV = u_CV.to(tl.float32) - tl.dot(w_CK, rounded_KV, input_precision=PRECISION)
        store_tile(x + head * value_width, x_CV, first, count, value_heads * value_width, start, value_width, C, V)
        scale_C = load_numbers(write_scale + head, first, count, value_heads, C)
        k_CK = load_tile(k + head // group * k_head, first, count, k_token, 0, key_width, C, K)
        state_KV *= tl.load(left + chunk * value_heads + head)
        state_KV += tl.dot(tl.trans(k_CK), (x_CV * scale_C[:, None]).to(dtype), input_precision=PRECISION)
    if HAS_FINAL:
        store_state(final + own, state_KV, start, key_width, value_width, K, V)


@triton_kernel(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=ROWS_OF_NUMBERS)
def state_gradients_kernel(
    q,  # [tokens, H, key_width]
    k,  # [tokens, H, key_width]
    w,  # [tokens, HV, key_width]
    dout,  # [tokens, HV, value_width]
    dx,  # [tokens, HV, value_width]: that from the chunk's own outputs on entry, all of it on return
    read_scale,  # [tokens, HV] float32: what a query is multiplied by where it reads the state before the chunk
    write_scale,  # [tokens, HV] float32
    left,  # [chunks, HV] float32
    chunks,  # [chunks, 2]: first token, number of tokens
    spans,  # [sequences, 2]: first chunk, and the one after the last
    dfinal,  # [sequences, HV, key_width, value_width] float32, or anything
    dafter,  # [chunks, HV, key_width, value_width]: the gradient of the state after each chunk
    dinitial,  # [sequences, HV, key_width, value_width], or anything
    q_token,
    q_head,
    k_token,
    k_head,
    dout_token,
    dout_head,
    key_width,
    value_width,
    value_heads,
    group,  # value heads of a key head
    HAS_FINAL: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    C: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tile, head, sequence = indices(tl.cdiv(value_width, V), value_heads)
    start = tile * V
    dtype = dx.dtype.element_ty
    size = tl.cast(key_width * value_width, tl.int64)  # widths of 1 are constants, which have no `to`
    own = (sequence * value_heads + head) * size
    if HAS_FINAL:
        dstate_KV = load_state(dfinal + own, start, key_width, value_width, K, V).to(tl.float32)
    else:
        dstate_KV = tl.zeros([K, V], tl.float32)
    begin, end = tl.load(spans + 2 * sequence), tl.load(spans + 2 * sequence + 1)
    for back in range(0, end - begin):
        chunk = end - 1 - back
        first, count = tl.load(chunks + 2 * chunk), tl.load(chunks + 2 * chunk + 1)
        rounded_KV = dstate_KV.to(dtype)
        dstate = dafter + (chunk * value_heads + head) * size
        store_state(dstate, rounded_KV, start, key_width, value_width, K, V)
        k_CK = load_tile(k + head // group * k_head, first, count, k_token, 0, key_width, C, K)
        scale_C = load_numbers(write_scale + head, first, count, value_heads, C)
        dx_CV = load_tile(dx + head * value_width, first, count, value_heads * value_width, start, value_width, C, V)
        dx_CV = dx_CV.to(tl.float32) + scale_C[:, None] * tl.dot(k_CK, rounded_KV, input_precision=PRECISION)
        store_tile(dx + head * value_width, dx_CV, first, count, value_heads * value_width, start, value_width, C, V)
        q_CK = load_tile(q + head // group * q_head, first, count, q_token, 0, key_width, C, K)
        dout_CV = load_tile(dout + head * dout_head, first, count, dout_token, start, value_width, C, V)
        read_C = load_numbers(read_scale + head, first, count, value_heads, C)
        w_CK = load_tile(w + head * key_width, first, count, value_heads * key_width, 0, key_width, C, K)
        dstate_KV *= tl.load(left + chunk * value_heads + head)
        most = tl.maximum(tl.max(tl.abs(read_C), 0), 1e-30)  # apart, so that float16 holds what a large decay leaves
        dread_CV = (dout_CV.to(tl.float32) * (read_C / most)[:, None]).to(dtype)
        dstate_KV += most * tl.dot(tl.trans(q_CK), dread_CV, input_precision=PRECISION)
        dstate_KV -= tl.dot(tl.trans(w_CK), dx_CV.to(dtype), input_precision=PRECISION)
    if HAS_INITIAL:
        store_state(dinitial + own, dstate_KV, start, key_width, value_width, K, V)
