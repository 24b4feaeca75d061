"""The outputs of a chunk, and the gradient of its corrections by them: one program for each chunk and value head.

An output reads the state before the chunk, and the corrections of the tokens up to its own:
``since * q @ S + (q @ k.T * P) @ X``.

Shape legend: ``C`` tokens of a chunk, ``K`` key width, ``V`` columns of the values in a tile.
"""

from __future__ import annotations

import triton.language as tl

from veomni_ops.triton_launches import triton_kernel
from veomni_triton.chunk_gated_delta_rule.states import load_state
from veomni_triton.chunk_gated_delta_rule.tiles import (
    NUMBERS,
    ROWS_OF_NUMBERS,
    decays,
    indices,
    inverse_norms,
    load_numbers,
    load_tile,
    store_numbers,
    store_tile,
)


@triton_kernel(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=ROWS_OF_NUMBERS)
def outputs_kernel(
    q,  # [tokens, H, key_width]
    k,  # [tokens, H, key_width]
    g,  # [tokens, HV]
    x,  # [tokens, HV, value_width]: the corrections
    before,  # [chunks, HV, key_width, value_width]
    chunks,  # [chunks, 2]: first token, number of tokens
    out,  # [tokens, HV, value_width]
    scale,
    q_token,
    q_head,
    k_token,
    k_head,
    g_token,
    g_head,
    key_width,
    value_width,
    value_heads,
    group,  # value heads of a key head
    NORMED: tl.constexpr,
    C: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tile, head, chunk = indices(tl.cdiv(value_width, V), value_heads)
    start = tile * V
    first, count = tl.load(chunks + 2 * chunk), tl.load(chunks + 2 * chunk + 1)
    if count == 0:
        return
    dtype = out.dtype.element_ty
    q_CK = load_tile(q + head // group * q_head, first, count, q_token, 0, key_width, C, K)
    k_CK = load_tile(k + head // group * k_head, first, count, k_token, 0, key_width, C, K)
    g_C = load_numbers(g + head * g_head, first, count, g_token, C)
    since_C, _to_end_C, pairwise_CC = decays(g_C, C)
    query_C = inverse_norms(q_CK, NORMED, C) * scale
    key_C = inverse_norms(k_CK, NORMED, C)
    attention_CC = tl.dot(q_CK, tl.trans(k_CK), input_precision=PRECISION) * pairwise_CC * key_C[None, :]
    state = before + (chunk * value_heads + head).to(tl.int64) * key_width * value_width
    state_KV = load_state(state, start, key_width, value_width, K, V)
    x_CV = load_tile(x + head * value_width, first, count, value_heads * value_width, start, value_width, C, V)
    out_CV = tl.dot(q_CK, state_KV, input_precision=PRECISION) * since_C[:, None]
    out_CV += tl.dot(attention_CC.to(dtype), x_CV, input_precision=PRECISION)
    out_CV *= query_C[:, None]
    store_tile(out + head * value_width, out_CV, first, count, value_heads * value_width, start, value_width, C, V)


@triton_kernel(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=ROWS_OF_NUMBERS)
def correction_gradients_kernel(
    q,  # [tokens, H, key_width]
    k,  # [tokens, H, key_width]
    g,  # [tokens, HV]
    dout,  # [tokens, HV, value_width]
    chunks,  # [chunks, 2]: first token, number of tokens
    dx,  # [tokens, HV, value_width]: the gradient of the corrections by the chunk's own outputs
    read_scale,  # [tokens, HV] float32
    scale,
    q_token,
    q_head,
    k_token,
    k_head,
    g_token,
    g_head,
    dout_token,
    dout_head,
    key_width,
    value_width,
    value_heads,
    group,  # value heads of a key head
    NORMED: tl.constexpr,
    C: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    PRECISION: tl.constexpr,
):
    _, head, chunk = indices(1, value_heads)
    first, count = tl.load(chunks + 2 * chunk), tl.load(chunks + 2 * chunk + 1)
    if count == 0:
        return
    dtype = dx.dtype.element_ty
    q_CK = load_tile(q + head // group * q_head, first, count, q_token, 0, key_width, C, K)
    k_CK = load_tile(k + head // group * k_head, first, count, k_token, 0, key_width, C, K)
    g_C = load_numbers(g + head * g_head, first, count, g_token, C)
    since_C, _to_end_C, pairwise_CC = decays(g_C, C)
    query_C = inverse_norms(q_CK, NORMED, C) * scale
    key_C = inverse_norms(k_CK, NORMED, C)
    store_numbers(read_scale + head, since_C * query_C, first, count, value_heads, C)
    attention_CC = tl.dot(q_CK, tl.trans(k_CK), input_precision=PRECISION) * pairwise_CC
    attention_CC = (attention_CC * query_C[:, None] * key_C[None, :]).to(dtype)
    dout_CV = load_tile(dout + head * dout_head, first, count, dout_token, 0, value_width, C, V)
    dx_CV = tl.dot(tl.trans(attention_CC), dout_CV, input_precision=PRECISION)
    store_tile(dx + head * value_width, dx_CV, first, count, value_heads * value_width, 0, value_width, C, V)
