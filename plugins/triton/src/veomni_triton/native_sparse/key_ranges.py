"""The branches of native sparse attention over a range of keys for each query: compressed keys, and a window.

Of both ranges' ends, none is before that of an earlier query. The shape legend is that of ``attention_tiles``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from veomni_ops.triton_launches import triton_kernel
from veomni_triton.attention_tiles import (
    SUMS,
    add_rows,
    attend,
    dlogits,
    finish,
    load,
    load_wide,
    products,
    store,
    store_wide,
    upstream,
    weights_of_keys,
)

RAISED = tl.constexpr(100.0)  # so that sums of 2**20 weights stay finite


@triton.jit
def _ranges(begins, stops, tokens, M: tl.constexpr):
    """A tile of queries: their tokens, which are some, their ranges, and the least range that has all of theirs."""
    start = tl.program_id(0) * M
    token_M = start + tl.arange(0, M)
    is_token_M = token_M < tokens
    begin_M = tl.load(begins + token_M, mask=is_token_M, other=0)
    stop_M = tl.load(stops + token_M, mask=is_token_M, other=0)
    last = tl.minimum(start + M, tokens) - 1
    return token_M.to(tl.int64), is_token_M, begin_M, stop_M, tl.load(begins + start), tl.load(stops + last)


@triton_kernel
def range_forward_kernel(
    query,
    key,
    value,
    begins,
    stops,
    output,
    norms,
    scaling,
    tokens,
    heads,
    groups,
    width: tl.constexpr,
    value_width: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    SPLIT: tl.constexpr,
    V: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attention of a tile of one head's queries, each to the keys from its ``begins`` to its ``stops``."""
    head = tl.program_id(1)
    group = head // (heads // groups)
    token_M, is_token_M, begin_M, stop_M, first, last = _ranges(begins, stops, tokens, M)
    row_M = token_M * heads + head
    query_MD, query_ME = load_wide(query, row_M, is_token_M, width, D, E, SPLIT)
    highest_M = tl.full([M], float("-inf"), dtype=tl.float32)
    sum_MS = tl.zeros([M, SUMS], dtype=tl.float32)
    output_MV = tl.zeros([M, V], dtype=tl.float32)
    for start in range(first, last, N):
        key_N = start + tl.arange(0, N)
        row_N = key_N.to(tl.int64) * groups + group
        key_ND, key_NE = load_wide(key, row_N, key_N < last, width, D, E, SPLIT)
        value_NV = load(value, row_N, key_N < last, value_width, V)
        seen_MN = (key_N[None, :] >= begin_M[:, None]) & (key_N[None, :] < stop_M[:, None])
        logit_MN = products(query_MD, query_ME, key_ND, key_NE, SPLIT, PRECISION) * scaling
        logit_MN = tl.where(seen_MN, logit_MN, float("-inf"))
        highest_M, sum_MS, output_MV = attend(
            logit_MN, 1.0, 0.0, value_NV, highest_M, sum_MS, output_MV, False, PRECISION
        )
    finish(output, norms, highest_M, sum_MS, output_MV, row_M, is_token_M, value_width, V)


@triton_kernel
def range_dquery_kernel(
    query,
    key,
    value,
    begins,
    stops,
    doutput,
    gates,
    norms,
    means,
    dquery,
    scaling,
    by_two,
    tokens,
    heads,
    groups,
    width: tl.constexpr,
    value_width: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    SPLIT: tl.constexpr,
    V: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add this branch's gradients to ``dquery``."""
    head = tl.program_id(1)
    group = head // (heads // groups)
    token_M, is_token_M, begin_M, stop_M, first, last = _ranges(begins, stops, tokens, M)
    row_M = token_M * heads + head
    query_MD, query_ME = load_wide(query, row_M, is_token_M, width, D, E, SPLIT)
    upstream_MV = load(doutput, row_M, is_token_M, value_width, V)
    gate_M, norm_M, mean_M = upstream(gates, norms, means, row_M, is_token_M)
    dquery_MD = tl.zeros([M, D], dtype=tl.float32)
    dquery_ME = tl.zeros([M, E], dtype=tl.float32)
    for start in range(first, last, N):
        key_N = start + tl.arange(0, N)
        row_N = key_N.to(tl.int64) * groups + group
        key_ND, key_NE = load_wide(key, row_N, key_N < last, width, D, E, SPLIT)
        value_NV = load(value, row_N, key_N < last, value_width, V)
        seen_MN = (key_N[None, :] >= begin_M[:, None]) & (key_N[None, :] < stop_M[:, None])
        logit_MN = products(query_MD, query_ME, key_ND, key_NE, SPLIT, PRECISION) * by_two
        dlogit_MN = dlogits(logit_MN, value_NV, upstream_MV, gate_M, norm_M, mean_M, seen_MN, scaling, PRECISION)
        dquery_MD, dquery_ME = add_rows(
            dquery_MD, dquery_ME, dlogit_MN.to(key_ND.dtype), key_ND, key_NE, SPLIT, PRECISION
        )
    former_MD, former_ME = load_wide(dquery, row_M, is_token_M, width, D, E, SPLIT)
    dquery_MD += former_MD.to(tl.float32)
    if SPLIT:
        dquery_ME += former_ME.to(tl.float32)
    store_wide(dquery, dquery_MD, dquery_ME, row_M, is_token_M, width, D, E, SPLIT)


@triton_kernel
def range_dkeys_kernel(
    query,
    key,
    value,
    begins,
    stops,
    firsts,
    lasts,
    doutput,
    gates,
    norms,
    means,
    dkey,
    dvalue,
    scaling,
    by_two,
    share,
    keys,
    heads,
    groups,
    width: tl.constexpr,
    value_width: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    SPLIT: tl.constexpr,
    V: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The gradients of a tile of keys of one head, from the queries ``firsts`` to ``lasts``, which may see some.

    A program adds up ``share`` of the key head's heads, and writes to a part ``[keys, G, D or V]`` of its own.
    """
    group = tl.program_id(1)
    key_N = tl.program_id(0) * N + tl.arange(0, N)
    row_N, is_key_N = key_N.to(tl.int64) * groups + group, key_N < keys
    key_ND, key_NE = load_wide(key, row_N, is_key_N, width, D, E, SPLIT)
    value_NV = load(value, row_N, is_key_N, value_width, V)
    dkey_ND = tl.zeros([N, D], dtype=tl.float32)
    dkey_NE = tl.zeros([N, E], dtype=tl.float32)
    dvalue_NV = tl.zeros([N, V], dtype=tl.float32)
    first, last = tl.load(firsts + tl.program_id(0)), tl.load(lasts + tl.program_id(0))
    last_head = (group + 1) * (heads // groups)
    first_head = group * (heads // groups) + tl.program_id(2) * share
    for head in range(first_head, tl.minimum(first_head + share, last_head)):
        for start in range(first, last, M):
            token_M = start + tl.arange(0, M)
            is_token_M = token_M < last
            begin_M = tl.load(begins + token_M, mask=is_token_M, other=0)
            stop_M = tl.load(stops + token_M, mask=is_token_M, other=0)
            row_M = token_M.to(tl.int64) * heads + head
            query_MD, query_ME = load_wide(query, row_M, is_token_M, width, D, E, SPLIT)
            upstream_MV = load(doutput, row_M, is_token_M, value_width, V)
            gate_M, norm_M, mean_M = upstream(gates, norms, means, row_M, is_token_M)
            seen_NM = (key_N[:, None] >= begin_M[None, :]) & (key_N[:, None] < stop_M[None, :]) & is_key_N[:, None]
            logit_NM = products(key_ND, key_NE, query_MD, query_ME, SPLIT, PRECISION) * by_two
            dlogit_NM, dvalue_NV = weights_of_keys(
                logit_NM, value_NV, upstream_MV, gate_M, norm_M, mean_M, seen_NM, scaling, dvalue_NV, PRECISION
            )
            dkey_ND, dkey_NE = add_rows(
                dkey_ND, dkey_NE, dlogit_NM.to(query_MD.dtype), query_MD, query_ME, SPLIT, PRECISION
            )
    row_N += tl.program_id(2).to(tl.int64) * keys * groups
    store_wide(dkey, dkey_ND, dkey_NE, row_N, is_key_N, width, D, E, SPLIT)
    store(dvalue, dvalue_NV, row_N, is_key_N, value_width, V)


@triton_kernel
def sums_kernel(
    query,
    key,
    begins,
    stops,
    norms,
    sums,
    first_token,
    rows,
    keys,
    heads,
    groups,
    scaling,
    width: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``sums[G, rows, keys]``: weights of some queries, times ``2**RAISED``, summed over the heads of each key head.

    Scores are compared alone. Without the factor those below 2**-126 would be equal: ``exp2`` gives no denormals on a
    GPU. What no query of a tile sees is left as it is.
    """
    group = tl.program_id(2)
    row_M, key_N = tl.program_id(0) * M + tl.arange(0, M), tl.program_id(1) * N + tl.arange(0, N)
    is_row_M, is_key_N = row_M < rows, key_N < keys
    token_M = (first_token + row_M).to(tl.int64)
    begin_M = tl.load(begins + token_M, mask=is_row_M, other=0)
    stop_M = tl.load(stops + token_M, mask=is_row_M, other=0)
    seen_MN = (key_N[None, :] >= begin_M[:, None]) & (key_N[None, :] < stop_M[:, None]) & is_key_N[None, :]
    if tl.max(tl.max(seen_MN.to(tl.int32), 1), 0) > 0:
        key_ND, key_NE = load_wide(key, key_N.to(tl.int64) * groups + group, is_key_N, width, D, E, SPLIT)
        sum_MN = tl.zeros([M, N], dtype=tl.float32)
        per_group = heads // groups
        for head in range(group * per_group, (group + 1) * per_group):
            at_M = token_M * heads + head
            query_MD, query_ME = load_wide(query, at_M, is_row_M, width, D, E, SPLIT)
            norm_M = tl.load(norms + at_M, mask=is_row_M, other=float("inf"))
            logit_MN = products(query_MD, query_ME, key_ND, key_NE, SPLIT, PRECISION) * scaling
            sum_MN += tl.exp2(logit_MN - (norm_M - RAISED)[:, None])
        into_MN = sums + (group.to(tl.int64) * rows + row_M[:, None]) * keys + key_N[None, :]
        tl.store(into_MN, sum_MN, mask=seen_MN & is_row_M[:, None])
