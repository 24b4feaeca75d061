"""What a chunk's corrections of the state are made of, without the state: one program for each chunk and value head.

The corrections are ``X = u - w @ S`` of the state ``S`` before the chunk, with ``u = T @ (beta * v)``,
``w = T @ (beta * since * k)`` and ``T = (I + A)^-1``, where ``A[i, j] = beta[i] * (k[i] @ k[j]) * P[i, j]``, ``j < i``.
Here ``since`` is the decay from before the chunk to a token, and ``P[i, j]`` that from token ``j`` to token ``i``.

Keys are multiplied as they are in memory; what normalises them goes into the other factor, which is rounded anyway.

Shape legend: ``C`` tokens of a chunk, ``K`` key width, ``V`` value width.
"""

from __future__ import annotations

import triton.language as tl

from veomni_ops.triton_launches import triton_kernel
from veomni_triton.chunk_gated_delta_rule.inverse import unit_lower_inverse
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
def corrections_kernel(
    k,  # [tokens, H, key_width]
    v,  # [tokens, HV, value_width]
    g,  # [tokens, HV]
    beta,  # [tokens, HV]
    chunks,  # [chunks, 2]: first token, number of tokens
    u,  # [tokens, HV, value_width]
    w,  # [tokens, HV, key_width]
    inverse,  # [chunks, HV, C, C]: T, for backward
    write_scale,  # [tokens, HV] float32: what a key is multiplied by where its correction is written into the state
    left,  # [chunks, HV] float32: what the chunk leaves of the state
    k_token,
    k_head,
    v_token,
    v_head,
    g_token,
    g_head,
    beta_token,
    beta_head,
    key_width,
    value_width,
    value_heads,
    group,  # value heads of a key head
    NORMED: tl.constexpr,
    KEEPS_INVERSE: tl.constexpr,
    C: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    PRECISION: tl.constexpr,
):
    _, head, chunk = indices(1, value_heads)
    first, count = tl.load(chunks + 2 * chunk), tl.load(chunks + 2 * chunk + 1)
    if count == 0:
        return
    dtype = u.dtype.element_ty
    k_CK = load_tile(k + head // group * k_head, first, count, k_token, 0, key_width, C, K)
    g_C = load_numbers(g + head * g_head, first, count, g_token, C)
    beta_C = load_numbers(beta + head * beta_head, first, count, beta_token, C)
    factor_C = inverse_norms(k_CK, NORMED, C)
    since_C, to_end_C, pairwise_CC = decays(g_C, C)

    row_C = tl.arange(0, C)
    is_below_CC = row_C[:, None] > row_C[None, :]
    products_CC = tl.dot(k_CK, tl.trans(k_CK), input_precision=PRECISION) * factor_C[:, None] * factor_C[None, :]
    overlap_CC = tl.where(is_below_CC, products_CC * pairwise_CC, 0.0)
    system_CC = overlap_CC * beta_C[:, None]
    inverse_CC = unit_lower_inverse(system_CC, C, PRECISION)

    reading_CC = (inverse_CC * (beta_C * since_C * factor_C)[None, :]).to(dtype)
    w_CK = tl.dot(reading_CC, k_CK, input_precision=PRECISION)
    store_tile(w + head * key_width, w_CK, first, count, value_heads * key_width, 0, key_width, C, K)
    written_CC = (inverse_CC * beta_C[None, :]).to(dtype)
    v_CV = load_tile(v + head * v_head, first, count, v_token, 0, value_width, C, V)
    u_CV = tl.dot(written_CC, v_CV, input_precision=PRECISION)
    store_tile(u + head * value_width, u_CV, first, count, value_heads * value_width, 0, value_width, C, V)

    store_numbers(write_scale + head, to_end_C * factor_C, first, count, value_heads, C)
    total = tl.sum(tl.where(row_C == C - 1, since_C, 0.0), axis=0)  # tokens that are missing don't decay
    tl.store(left + chunk * value_heads + head, total)
    if KEEPS_INVERSE:
        place_CC = row_C[:, None] * C + row_C[None, :]
        matrix = inverse + (chunk * value_heads + head).to(tl.int64) * C * C
        tl.store(matrix + place_CC, inverse_CC.to(dtype))
