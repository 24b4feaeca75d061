"""The gradients of queries, keys, values and both gates: programs for each chunk and value head.

:func:`product_gradients_kernel` needs no state, and ends with the gradients of the products of queries and keys.
:func:`query_gradients_kernel` and :func:`key_gradients_kernel` add what reads and writes the state. One kernel for all
of it had more values than registers: it spilled 1.4 KB a thread, and took 1.57 ms on an H200 for what three do in 0.77
(2 x 4096 tokens, 32 value heads of 128). Value heads that share a key head have a gradient of it each, which
:func:`shared_gradients_kernel` adds up.

Shape legend: ``C`` tokens of a chunk, ``K`` key width, ``V`` columns of the values in a tile, ``R`` rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from veomni_ops.triton_launches import triton_kernel
from veomni_triton.chunk_gated_delta_rule.states import load_state
from veomni_triton.chunk_gated_delta_rule.tiles import (
    NUMBERS,
    ROWS_OF_NUMBERS,
    decays,
    decays_of_ends,
    indices,
    inverse_norms,
    load_numbers,
    load_tile,
    store_numbers,
    store_tile,
)


@triton_kernel(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=ROWS_OF_NUMBERS)
def product_gradients_kernel(
    q,  # [tokens, H, key_width]
    k,  # [tokens, H, key_width]
    v,  # [tokens, HV, value_width]
    g,  # [tokens, HV]
    beta,  # [tokens, HV]
    x,  # [tokens, HV, value_width]: the corrections
    inverse,  # [chunks, HV, C, C]
    dout,  # [tokens, HV, value_width]
    dx,  # [tokens, HV, value_width]: of the corrections on entry, of the right sides that they solve on return
    chunks,  # [chunks, 2]: first token, number of tokens
    dscores,  # [chunks, HV, C, C]: of the products of queries and keys of norm 1, scaled as the outputs have them
    dproducts,  # [chunks, HV, C, C]: of the products of keys of norm 1, both triangles
    dv,  # [tokens, HV, value_width]
    dg,  # [tokens, HV] float32: the part that is known here
    dbeta,  # [tokens, HV] float32: the part that is known here
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
    dtype = x.dtype.element_ty
    row_C = tl.arange(0, C)
    is_below_CC = row_C[:, None] > row_C[None, :]
    stride, place = value_heads * value_width, head * value_width
    matrix_CC = (chunk * value_heads + head).to(tl.int64) * C * C + row_C[:, None] * C + row_C[None, :]
    beta_C = load_numbers(beta + head * beta_head, first, count, beta_token, C)
    inverse_CC = tl.load(inverse + matrix_CC)
    dattention_CC = tl.zeros([C, C], tl.float32)  # of q @ k.T * P
    dsystem_CC = tl.zeros([C, C], tl.float32)  # of A
    dbeta_C = tl.zeros([C], tl.float32)
    for start in range(0, value_width, V):
        x_CV = load_tile(x + place, first, count, stride, start, value_width, C, V)
        dx_CV = load_tile(dx + place, first, count, stride, start, value_width, C, V)
        dout_CV = load_tile(dout + head * dout_head, first, count, dout_token, start, value_width, C, V)
        v_CV = load_tile(v + head * v_head, first, count, v_token, start, value_width, C, V)
        dright_CV = tl.dot(tl.trans(inverse_CC), dx_CV, input_precision=PRECISION)
        store_tile(dv + place, dright_CV * beta_C[:, None], first, count, stride, start, value_width, C, V)
        dbeta_C += tl.sum(dright_CV * v_CV.to(tl.float32), axis=1)
        right_CV = dright_CV.to(dtype)
        store_tile(dx + place, right_CV, first, count, stride, start, value_width, C, V)
        dattention_CC += tl.dot(dout_CV, tl.trans(x_CV), input_precision=PRECISION)
        dsystem_CC -= tl.dot(right_CV, tl.trans(x_CV), input_precision=PRECISION)

    q_CK = load_tile(q + head // group * q_head, first, count, q_token, 0, key_width, C, K)
    k_CK = load_tile(k + head // group * k_head, first, count, k_token, 0, key_width, C, K)
    query_C, key_C = inverse_norms(q_CK, NORMED, C) * scale, inverse_norms(k_CK, NORMED, C)
    g_C = load_numbers(g + head * g_head, first, count, g_token, C)
    _since_C, _to_end_C, pairwise_CC = decays(g_C, C)
    products_CC = tl.dot(k_CK, tl.trans(k_CK), input_precision=PRECISION) * key_C[:, None] * key_C[None, :]
    dproducts_CC = tl.where(is_below_CC, dsystem_CC * pairwise_CC, 0.0)
    dbeta_C += tl.sum(dproducts_CC * products_CC, axis=1)
    dproducts_CC *= beta_C[:, None]
    tl.store(dproducts + matrix_CC, (dproducts_CC + tl.trans(dproducts_CC)).to(dtype))
    scores_CC = tl.dot(q_CK, tl.trans(k_CK), input_precision=PRECISION) * query_C[:, None] * key_C[None, :]
    dscores_CC = dattention_CC * pairwise_CC
    tl.store(dscores + matrix_CC, dscores_CC.to(dtype))
    # A factor of an exponential gives it the product of its own gradient and itself. g[m] is in the decays between
    # tokens j < m and i >= m.
    dbetween_CC = tl.where(is_below_CC, dscores_CC * scores_CC, 0.0) + dproducts_CC * products_CC
    later_CC = tl.cumsum(dbetween_CC, axis=0, reverse=True)
    dg_C = tl.sum(tl.where(is_below_CC, later_CC, 0.0), axis=1)
    store_numbers(dg + head, dg_C, first, count, value_heads, C)
    store_numbers(dbeta + head, dbeta_C, first, count, value_heads, C)


@triton_kernel(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=ROWS_OF_NUMBERS)
def query_gradients_kernel(
    q,  # [tokens, H, key_width]
    k,  # [tokens, H, key_width]
    g,  # [tokens, HV]
    before,  # [chunks, HV, key_width, value_width]
    dout,  # [tokens, HV, value_width]
    dscores,  # [chunks, HV, C, C]
    chunks,  # [chunks, 2]: first token, number of tokens
    dq,  # [tokens, HV, key_width]: of the query as this value head reads it
    dg,  # [tokens, HV] float32: gets what the decays since the start add
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
    dtype = dout.dtype.element_ty
    row_C = tl.arange(0, C)
    state = (chunk * value_heads + head).to(tl.int64) * key_width * value_width
    since_C, _to_end_C, _left = decays_of_ends(load_numbers(g + head * g_head, first, count, g_token, C))
    dq_CK = tl.zeros([C, K], tl.float32)
    for start in range(0, value_width, V):
        dout_CV = load_tile(dout + head * dout_head, first, count, dout_token, start, value_width, C, V)
        state_KV = load_state(before + state, start, key_width, value_width, K, V)
        dq_CK += tl.dot(dout_CV, tl.trans(state_KV), input_precision=PRECISION)
    dq_CK *= since_C[:, None]
    q_CK = load_tile(q + head // group * q_head, first, count, q_token, 0, key_width, C, K)
    k_CK = load_tile(k + head // group * k_head, first, count, k_token, 0, key_width, C, K)
    query_C, key_C = inverse_norms(q_CK, NORMED, C), inverse_norms(k_CK, NORMED, C)
    read_C = tl.sum(dq_CK * q_CK.to(tl.float32), axis=1) * query_C * scale
    dg_C = load_numbers(dg + head, first, count, value_heads, C) + tl.cumsum(read_C, axis=0, reverse=True)
    store_numbers(dg + head, dg_C, first, count, value_heads, C)
    matrix = dscores + (chunk * value_heads + head).to(tl.int64) * C * C
    of_query_CC = tl.load(matrix + row_C[:, None] * C + row_C[None, :]).to(tl.float32) * key_C[None, :]
    dq_CK += tl.dot(of_query_CC.to(dtype), k_CK, input_precision=PRECISION)
    dq_CK = _of_raw(dq_CK * scale, q_CK, query_C, NORMED)
    store_tile(dq + head * key_width, dq_CK, first, count, value_heads * key_width, 0, key_width, C, K)


@triton_kernel(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=ROWS_OF_NUMBERS)
def key_gradients_kernel(
    q,  # [tokens, H, key_width]
    k,  # [tokens, H, key_width]
    g,  # [tokens, HV]
    beta,  # [tokens, HV]
    x,  # [tokens, HV, value_width]: the corrections
    before,  # [chunks, HV, key_width, value_width]
    dafter,  # [chunks, HV, key_width, value_width]
    dright,  # [tokens, HV, value_width]: of the right sides that the corrections solve
    dscores,  # [chunks, HV, C, C]
    dproducts,  # [chunks, HV, C, C]
    dg_known,  # [tokens, HV] float32: the part that is known before
    dbeta_known,  # [tokens, HV] float32
    chunks,  # [chunks, 2]: first token, number of tokens
    dk,  # [tokens, HV, key_width]: of the key as this value head has it
    dg,  # [tokens, HV]
    dbeta,  # [tokens, HV]
    scale,
    q_token,
    q_head,
    k_token,
    k_head,
    g_token,
    g_head,
    beta_token,
    beta_head,
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
    dtype = x.dtype.element_ty
    row_C = tl.arange(0, C)
    is_below_CC = row_C[:, None] > row_C[None, :]
    stride, place = value_heads * value_width, head * value_width
    state = (chunk * value_heads + head).to(tl.int64) * key_width * value_width
    k_CK = load_tile(k + head // group * k_head, first, count, k_token, 0, key_width, C, K)
    beta_C = load_numbers(beta + head * beta_head, first, count, beta_token, C)
    since_C, to_end_C, left = decays_of_ends(load_numbers(g + head * g_head, first, count, g_token, C))
    # Keys read the state before the chunk, and write into the one after it. Products are with keys and queries as they
    # are in memory, as everywhere.
    dk_CK = tl.zeros([C, K], tl.float32)
    taken_C = tl.zeros([C], tl.float32)
    written_C = tl.zeros([C], tl.float32)
    dleft = 0.0
    for start in range(0, value_width, V):
        x_CV = load_tile(x + place, first, count, stride, start, value_width, C, V).to(tl.float32)
        right_CV = load_tile(dright + place, first, count, stride, start, value_width, C, V).to(tl.float32)
        state_KV = load_state(before + state, start, key_width, value_width, K, V)
        dstate_KV = load_state(dafter + state, start, key_width, value_width, K, V)
        dleft += tl.sum(state_KV.to(tl.float32) * dstate_KV.to(tl.float32))
        taken_C -= tl.sum(right_CV * tl.dot(k_CK, state_KV, input_precision=PRECISION), axis=1)
        written_C += tl.sum(x_CV * tl.dot(k_CK, dstate_KV, input_precision=PRECISION), axis=1)
        taken_CV = (right_CV * (beta_C * since_C)[:, None]).to(dtype)
        dk_CK -= tl.dot(taken_CV, tl.trans(state_KV), input_precision=PRECISION)
        written_CV = (x_CV * to_end_C[:, None]).to(dtype)
        dk_CK += tl.dot(written_CV, tl.trans(dstate_KV), input_precision=PRECISION)

    key_C = inverse_norms(k_CK, NORMED, C)
    taken_C *= key_C * since_C
    written_C *= key_C * to_end_C
    dbeta_C = load_numbers(dbeta_known + head, first, count, value_heads, C) + taken_C
    store_numbers(dbeta + head, dbeta_C, first, count, value_heads, C)
    # g[m] is in the decays since the start of i >= m, and to the end of j < m.
    dg_C = load_numbers(dg_known + head, first, count, value_heads, C)
    dg_C += tl.cumsum(taken_C * beta_C, axis=0, reverse=True)
    dg_C += tl.sum(tl.where(is_below_CC, written_C[None, :], 0.0), axis=1) + dleft * left
    store_numbers(dg + head, dg_C, first, count, value_heads, C)

    matrix_CC = (chunk * value_heads + head).to(tl.int64) * C * C + row_C[:, None] * C + row_C[None, :]
    of_key_CC = (tl.load(dproducts + matrix_CC).to(tl.float32) * key_C[None, :]).to(dtype)
    dk_CK += tl.dot(of_key_CC, k_CK, input_precision=PRECISION)
    q_CK = load_tile(q + head // group * q_head, first, count, q_token, 0, key_width, C, K)
    asked_CC = tl.load(dscores + matrix_CC).to(tl.float32) * (inverse_norms(q_CK, NORMED, C) * scale)[:, None]
    dk_CK += tl.dot(tl.trans(asked_CC.to(dtype)), q_CK, input_precision=PRECISION)
    dk_CK = _of_raw(dk_CK, k_CK, key_C, NORMED)
    store_tile(dk + head * key_width, dk_CK, first, count, value_heads * key_width, 0, key_width, C, K)


@triton.jit
def _of_raw(dunit_CK, raw_CK, factor_C, NORMED: tl.constexpr):
    """The gradient of a query or key as it is in memory, of that of norm 1, which is ``factor`` times it."""
    if NORMED:
        wide_CK = raw_CK.to(tl.float32)
        along_C = tl.sum(wide_CK * dunit_CK, axis=1) * factor_C * factor_C
        dunit_CK = (dunit_CK - wide_CK * along_C[:, None]) * factor_C[:, None]
    return dunit_CK


@triton_kernel
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
