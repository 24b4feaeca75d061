"""The gradients of queries, keys, values and both gates: one program for each chunk and value head.

Value heads that share a key head have a gradient of it each, which :func:`shared_gradients_kernel` adds up.

Shape legend: ``C`` tokens of a chunk, ``K`` key width, ``V`` columns of the values in a tile, ``R`` rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from veomni_triton.chunk_gated_delta_rule.states import load_state
from veomni_triton.chunk_gated_delta_rule.tiles import (
    decays,
    inverse_norms,
    load_numbers,
    load_tile,
    store_numbers,
    store_tile,
)


@triton.jit
def gradients_kernel(
    q,  # [tokens, H, key_width]
    k,  # [tokens, H, key_width]
    v,  # [tokens, HV, value_width]
    g,  # [tokens, HV]
    beta,  # [tokens, HV]
    x,  # [tokens, HV, value_width]: the corrections
    inverse,  # [chunks, HV, C, C]
    before,  # [chunks, HV, key_width, value_width]
    dafter,  # [chunks, HV, key_width, value_width]
    dout,  # [tokens, HV, value_width]
    dx,  # [tokens, HV, value_width]; overwritten
    chunks,  # [chunks, 2]: first token, number of tokens
    dq,  # [tokens, HV, key_width]: of the query as this value head reads it
    dk,  # [tokens, HV, key_width]
    dv,  # [tokens, HV, value_width]
    dg,  # [tokens, HV]
    dbeta,  # [tokens, HV]
    scale,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    g_token,
    g_head,
    beta_token,
    beta_head,
    dout_token,
    dout_head,
    key_width,
    value_width,
    value_heads,
    GROUP: tl.constexpr,
    NORMED: tl.constexpr,
    C: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    PRECISION: tl.constexpr,
):
    head, chunk = tl.program_id(0), tl.program_id(1)
    first, count = tl.load(chunks + 2 * chunk), tl.load(chunks + 2 * chunk + 1)
    if count == 0:
        return
    dtype = x.dtype.element_ty
    row_C = tl.arange(0, C)
    is_below_CC = row_C[:, None] > row_C[None, :]
    size = (key_width * value_width).to(tl.int64)
    stride, key_stride = value_heads * value_width, value_heads * key_width
    place, key_place, state = head * value_width, head * key_width, (chunk * value_heads + head) * size
    q_CK = load_tile(q + head // GROUP * q_head, first, count, q_token, 0, key_width, C, K)
    k_CK = load_tile(k + head // GROUP * k_head, first, count, k_token, 0, key_width, C, K)
    query_C, key_C = inverse_norms(q_CK, NORMED, C), inverse_norms(k_CK, NORMED, C)
    g_C = load_numbers(g + head * g_head, first, count, g_token, C)
    beta_C = load_numbers(beta + head * beta_head, first, count, beta_token, C)
    since_C, to_end_C, pairwise_CC = decays(g_C, C)
    inverse_CC = tl.load(
        inverse + (chunk * value_heads + head).to(tl.int64) * C * C + row_C[:, None] * C + row_C[None, :]
    )
    dattention_CC = tl.zeros([C, C], tl.float32)  # of q @ k.T * P
    dsystem_CC = tl.zeros([C, C], tl.float32)  # of A
    dbeta_C = tl.zeros([C], tl.float32)
    for start in range(0, value_width, V):
        x_CV = load_tile(x + place, first, count, stride, start, value_width, C, V)
        dx_CV = load_tile(dx + place, first, count, stride, start, value_width, C, V)
        dout_CV = load_tile(dout + head * dout_head, first, count, dout_token, start, value_width, C, V)
        v_CV = load_tile(v + head * v_head, first, count, v_token, start, value_width, C, V)
        # Of the right side that the corrections solve.
        dright_CV = tl.dot(tl.trans(inverse_CC), dx_CV, input_precision=PRECISION)
        store_tile(dv + place, dright_CV * beta_C[:, None], first, count, stride, start, value_width, C, V)
        dbeta_C += tl.sum(dright_CV * v_CV.to(tl.float32), axis=1)
        right_CV = dright_CV.to(dtype)
        store_tile(dx + place, right_CV, first, count, stride, start, value_width, C, V)
        dattention_CC += tl.dot(dout_CV, tl.trans(x_CV), input_precision=PRECISION)
        dsystem_CC -= tl.dot(right_CV, tl.trans(x_CV), input_precision=PRECISION)

    # Of the products of queries and keys, and of keys with each other.
    scores_CC = tl.dot(q_CK, tl.trans(k_CK), input_precision=PRECISION)
    scores_CC *= (query_C * scale)[:, None] * key_C[None, :]
    products_CC = tl.dot(k_CK, tl.trans(k_CK), input_precision=PRECISION) * key_C[:, None] * key_C[None, :]
    dscores_CC = dattention_CC * pairwise_CC
    dproducts_CC = tl.where(is_below_CC, dsystem_CC * pairwise_CC, 0.0)
    dbeta_C += tl.sum(dproducts_CC * products_CC, axis=1)
    dproducts_CC *= beta_C[:, None]
    # A factor of an exponential gives it the product of its own gradient and itself. g[m] is in the decays between
    # tokens j < m and i >= m.
    dbetween_CC = tl.where(is_below_CC, dscores_CC * scores_CC, 0.0) + dproducts_CC * products_CC
    later_CC = tl.cumsum(dbetween_CC, axis=0, reverse=True)
    dg_C = tl.sum(tl.where(is_below_CC, later_CC, 0.0), axis=1)
    of_query_CC = (dscores_CC * key_C[None, :]).to(dtype)
    of_key_CC = ((dproducts_CC + tl.trans(dproducts_CC)) * key_C[None, :]).to(dtype)
    asked_CC = (tl.trans(dscores_CC) * (query_C * scale)[None, :]).to(dtype)
    tl.debug_barrier()  # what follows reads what all threads of this program wrote into dx

    # Of queries and keys of norm 1, as they read the state before the chunk and as corrections are written by keys.
    # Products are with keys and queries as they are in memory, as everywhere.
    dq_CK = tl.zeros([C, K], tl.float32)
    dk_CK = tl.zeros([C, K], tl.float32)
    taken_C = tl.zeros([C], tl.float32)
    written_C = tl.zeros([C], tl.float32)
    dleft = 0.0
    for start in range(0, value_width, V):
        x_CV = load_tile(x + place, first, count, stride, start, value_width, C, V).to(tl.float32)
        right_CV = load_tile(dx + place, first, count, stride, start, value_width, C, V).to(tl.float32)
        dout_CV = load_tile(dout + head * dout_head, first, count, dout_token, start, value_width, C, V)
        state_KV = load_state(before + state, start, key_width, value_width, K, V)
        dstate_KV = load_state(dafter + state, start, key_width, value_width, K, V)
        dleft += tl.sum(state_KV.to(tl.float32) * dstate_KV.to(tl.float32))
        taken_C -= tl.sum(right_CV * tl.dot(k_CK, state_KV, input_precision=PRECISION), axis=1)
        written_C += tl.sum(x_CV * tl.dot(k_CK, dstate_KV, input_precision=PRECISION), axis=1)
        read_CV = (dout_CV.to(tl.float32) * since_C[:, None]).to(dtype)
        dq_CK += tl.dot(read_CV, tl.trans(state_KV), input_precision=PRECISION)
        taken_CV = (right_CV * (beta_C * since_C)[:, None]).to(dtype)
        dk_CK -= tl.dot(taken_CV, tl.trans(state_KV), input_precision=PRECISION)
        written_CV = (x_CV * to_end_C[:, None]).to(dtype)
        dk_CK += tl.dot(written_CV, tl.trans(dstate_KV), input_precision=PRECISION)
    read_C = tl.sum(dq_CK * q_CK.to(tl.float32), axis=1) * query_C * scale
    taken_C *= key_C * since_C
    written_C *= key_C * to_end_C
    store_numbers(dbeta + head, dbeta_C + taken_C, first, count, value_heads, C)
    # g[m] is in the decays since the start of i >= m, and to the end of j < m.
    dg_C += tl.cumsum(read_C + taken_C * beta_C, axis=0, reverse=True)
    dg_C += tl.sum(tl.where(is_below_CC, written_C[None, :], 0.0), axis=1)
    dg_C += dleft * tl.sum(tl.where(row_C == C - 1, since_C, 0.0), axis=0)
    store_numbers(dg + head, dg_C, first, count, value_heads, C)

    dq_CK += tl.dot(of_query_CC, k_CK, input_precision=PRECISION)
    dk_CK += tl.dot(of_key_CC, k_CK, input_precision=PRECISION)
    dk_CK += tl.dot(asked_CC, q_CK, input_precision=PRECISION)
    dq_CK = _of_raw(dq_CK * scale, q_CK, query_C, NORMED)
    dk_CK = _of_raw(dk_CK, k_CK, key_C, NORMED)
    store_tile(dq + key_place, dq_CK, first, count, key_stride, 0, key_width, C, K)
    store_tile(dk + key_place, dk_CK, first, count, key_stride, 0, key_width, C, K)


@triton.jit
def _of_raw(dunit_CK, raw_CK, factor_C, NORMED: tl.constexpr):
    """The gradient of a query or key as it is in memory, of that of norm 1, which is ``factor`` times it."""
    if NORMED:
        wide_CK = raw_CK.to(tl.float32)
        along_C = tl.sum(wide_CK * dunit_CK, axis=1) * factor_C * factor_C
        dunit_CK = (dunit_CK - wide_CK * along_C[:, None]) * factor_C[:, None]
    return dunit_CK


@triton.jit
def shared_gradients_kernel(
    each,  # [rows, GROUP, width]: those of value heads
    total,  # [rows, width]: their sums
    rows,
    width,
    GROUP: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
):
    row_R, column_K = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R), tl.arange(0, K)
    inside_RK = (row_R < rows)[:, None] & (column_K < width)[None, :]
    sum_RK = tl.zeros([R, K], tl.float32)
    for member in tl.static_range(GROUP):
        place_RK = (row_R * GROUP + member)[:, None] * width + column_K[None, :]
        sum_RK += tl.load(each + place_RK, mask=inside_RK, other=0.0).to(tl.float32)
    place_RK = row_R[:, None] * width + column_K[None, :]
    tl.store(total + place_RK, sum_RK.to(total.dtype.element_ty), mask=inside_RK)
