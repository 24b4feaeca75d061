"""The gradients of queries, keys, values and both gates: one program for each chunk and key head.

A program goes through the value heads of its key head one after another and adds their gradients of query and key, in
float32, so the order of the sum is fixed.

Shape legend: ``C`` tokens of a chunk, ``K`` key width, ``V`` columns of the values in a tile.
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
    dx,  # [tokens, HV, value_width]
    chunks,  # [chunks, 2]: first token, number of tokens
    dq,  # [tokens, H, key_width]
    dk,  # [tokens, H, key_width]
    dv,  # [tokens, HV, value_width]
    dg,  # [tokens, HV]
    dbeta,  # [tokens, HV]
    dq_sum,  # [tokens, H, key_width] float32, where value heads are added up; anything if GROUP is 1
    dk_sum,  # [tokens, H, key_width] float32
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
    heads,
    GROUP: tl.constexpr,
    NORMED: tl.constexpr,
    C: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    PRECISION: tl.constexpr,
):
    key_head, chunk = tl.program_id(0), tl.program_id(1)
    first, count = tl.load(chunks + 2 * chunk), tl.load(chunks + 2 * chunk + 1)
    if count == 0:
        return
    dtype = x.dtype.element_ty
    value_heads = heads * GROUP
    row_C = tl.arange(0, C)
    is_below_CC = row_C[:, None] > row_C[None, :]
    size = (key_width * value_width).to(tl.int64)
    for member in range(0, GROUP):
        head = key_head * GROUP + member
        g_C = load_numbers(g + head * g_head, first, count, g_token, C)
        beta_C = load_numbers(beta + head * beta_head, first, count, beta_token, C)
        since_C, to_end_C, pairwise_CC = decays(g_C, C)
        inverse_CC = tl.load(
            inverse + (chunk * value_heads + head).to(tl.int64) * C * C + row_C[:, None] * C + row_C[None, :]
        )
        # The gradients of what outputs read of the state, of what corrections read of it and of what they are written
        # by, and those of q @ k.T * P and of A.
        dread_CK = tl.zeros([C, K], tl.float32)
        dtaken_CK = tl.zeros([C, K], tl.float32)
        dwritten_CK = tl.zeros([C, K], tl.float32)
        dattention_CC = tl.zeros([C, C], tl.float32)
        dsystem_CC = tl.zeros([C, C], tl.float32)
        dbeta_C = tl.zeros([C], tl.float32)
        dleft = 0.0
        for start in range(0, value_width, V):
            place = head * value_width
            stride = value_heads * value_width
            x_CV = load_tile(x + place, first, count, stride, start, value_width, C, V)
            dx_CV = load_tile(dx + place, first, count, stride, start, value_width, C, V)
            dout_CV = load_tile(dout + head * dout_head, first, count, dout_token, start, value_width, C, V)
            v_CV = load_tile(v + head * v_head, first, count, v_token, start, value_width, C, V)
            state = (chunk * value_heads + head) * size
            state_KV = load_state(before + state, start, key_width, value_width, K, V)
            dstate_KV = load_state(dafter + state, start, key_width, value_width, K, V)
            # Of the right side that the corrections solve.
            dright_CV = tl.dot(tl.trans(inverse_CC), dx_CV, input_precision=PRECISION)
            store_tile(dv + place, dright_CV * beta_C[:, None], first, count, stride, start, value_width, C, V)
            dbeta_C += tl.sum(dright_CV * v_CV.to(tl.float32), axis=1)
            dleft += tl.sum(state_KV.to(tl.float32) * dstate_KV.to(tl.float32))
            right_CV = dright_CV.to(dtype)
            dattention_CC += tl.dot(dout_CV, tl.trans(x_CV), input_precision=PRECISION)
            dsystem_CC -= tl.dot(right_CV, tl.trans(x_CV), input_precision=PRECISION)
            dread_CK += tl.dot(dout_CV, tl.trans(state_KV), input_precision=PRECISION)
            dtaken_CK -= tl.dot(right_CV, tl.trans(state_KV), input_precision=PRECISION)
            dwritten_CK += tl.dot(x_CV, tl.trans(dstate_KV), input_precision=PRECISION)

        q_CK = load_tile(q + key_head * q_head, first, count, q_token, 0, key_width, C, K)
        k_CK = load_tile(k + key_head * k_head, first, count, k_token, 0, key_width, C, K)
        query_C, key_C = inverse_norms(q_CK, NORMED, C), inverse_norms(k_CK, NORMED, C)
        scores_CC = (
            tl.dot(q_CK, tl.trans(k_CK), input_precision=PRECISION) * (query_C * scale)[:, None] * key_C[None, :]
        )
        products_CC = tl.dot(k_CK, tl.trans(k_CK), input_precision=PRECISION) * key_C[:, None] * key_C[None, :]
        # Of the products of queries and keys, and of keys with each other.
        dscores_CC = dattention_CC * pairwise_CC
        dproducts_CC = tl.where(is_below_CC, dsystem_CC * pairwise_CC, 0.0)
        dbeta_C += tl.sum(dproducts_CC * products_CC, axis=1)
        dproducts_CC *= beta_C[:, None]
        # A factor of an exponential gives it the product of its own gradient and itself.
        dbetween_CC = tl.where(is_below_CC, dscores_CC * scores_CC, 0.0) + dproducts_CC * products_CC
        read_C = tl.sum(dread_CK * q_CK.to(tl.float32), axis=1) * query_C * scale * since_C
        taken_C = tl.sum(dtaken_CK * k_CK.to(tl.float32), axis=1) * key_C * since_C
        written_C = tl.sum(dwritten_CK * k_CK.to(tl.float32), axis=1) * key_C * to_end_C
        dbeta_C += taken_C
        store_numbers(dbeta + head, dbeta_C, first, count, value_heads, C)
        # g[m] is in the decays since the start of i >= m, to the end of j < m, and between j < m and i >= m.
        later_CC = tl.cumsum(dbetween_CC, axis=0, reverse=True)
        dg_C = tl.sum(tl.where(is_below_CC, later_CC, 0.0), axis=1)
        dg_C += tl.cumsum(read_C + taken_C * beta_C, axis=0, reverse=True)
        dg_C += tl.sum(tl.where(is_below_CC, written_C[None, :], 0.0), axis=1)
        dg_C += dleft * tl.sum(tl.where(row_C == C - 1, since_C, 0.0), axis=0)
        store_numbers(dg + head, dg_C, first, count, value_heads, C)

        # Of queries and keys of norm 1. The products are with those in memory, as everywhere.
        dq_CK = tl.dot((dscores_CC * key_C[None, :]).to(dtype), k_CK, input_precision=PRECISION)
        dq_CK += dread_CK * since_C[:, None]
        both_CC = ((dproducts_CC + tl.trans(dproducts_CC)) * key_C[None, :]).to(dtype)
        dk_CK = tl.dot(both_CC, k_CK, input_precision=PRECISION)
        asked_CC = (tl.trans(dscores_CC) * (query_C * scale)[None, :]).to(dtype)
        dk_CK += tl.dot(asked_CC, q_CK, input_precision=PRECISION)
        dk_CK += dtaken_CK * (beta_C * since_C)[:, None] + dwritten_CK * to_end_C[:, None]
        dq_CK = _of_raw(dq_CK * scale, q_CK, query_C, NORMED)
        dk_CK = _of_raw(dk_CK, k_CK, key_C, NORMED)
        place, stride = key_head * key_width, heads * key_width
        if GROUP > 1:
            if member > 0:
                dq_CK += load_tile(dq_sum + place, first, count, stride, 0, key_width, C, K)
                dk_CK += load_tile(dk_sum + place, first, count, stride, 0, key_width, C, K)
            if member < GROUP - 1:
                store_tile(dq_sum + place, dq_CK, first, count, stride, 0, key_width, C, K)
                store_tile(dk_sum + place, dk_CK, first, count, stride, 0, key_width, C, K)
            else:
                store_tile(dq + place, dq_CK, first, count, stride, 0, key_width, C, K)
                store_tile(dk + place, dk_CK, first, count, stride, 0, key_width, C, K)
            tl.debug_barrier()  # the next head reads what all threads of this program wrote
        else:
            store_tile(dq + place, dq_CK, first, count, stride, 0, key_width, C, K)
            store_tile(dk + place, dk_CK, first, count, stride, 0, key_width, C, K)


@triton.jit
def _of_raw(dunit_CK, raw_CK, factor_C, NORMED: tl.constexpr):
    """The gradient of a query or key as it is in memory, of that of norm 1, which is ``factor`` times it."""
    if NORMED:
        wide_CK = raw_CK.to(tl.float32)
        along_C = tl.sum(wide_CK * dunit_CK, axis=1) * factor_C * factor_C
        dunit_CK = (dunit_CK - wide_CK * along_C[:, None]) * factor_C[:, None]
    return dunit_CK
