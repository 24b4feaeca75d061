"""Attention of one query to its chosen keys, and its gradients: programs of a query and some of its heads.

A key's first columns are its value, so a tile of keys is read once for both: in two parts, of values and of the rest.

Shape legend: ``H`` heads of a program, ``K`` keys of a tile, ``V`` columns of values and ``R`` of the rest, padded.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _load_heads(x, row, head_H, heads, stride, column, width, C: tl.constexpr):
    """``[H, C]`` of a query, from ``column`` on; each of its heads is ``stride`` long."""
    column_C = tl.arange(0, C)
    inside_HC = (head_H < heads)[:, None] & (column_C < width)[None, :]
    place_HC = (row * heads + head_H.to(tl.int64))[:, None] * stride + column + column_C[None, :]
    return tl.load(x + place_HC, mask=inside_HC, other=0.0)


@triton.jit
def _store_heads(x, tile_HC, row, head_H, heads, stride, column, width, C: tl.constexpr):
    """Write what :func:`_load_heads` reads."""
    column_C = tl.arange(0, C)
    inside_HC = (head_H < heads)[:, None] & (column_C < width)[None, :]
    place_HC = (row * heads + head_H.to(tl.int64))[:, None] * stride + column + column_C[None, :]
    tl.store(x + place_HC, tile_HC.to(x.dtype.element_ty), mask=inside_HC)


@triton.jit
def _load_norms(norms, row, head_H, heads):
    """A query's highest logits and its sums ``[H]``; weights of heads beyond its own become zeros.

    The logarithm of the sum is not added to the highest: beside a logit of 1e6, float32 would keep four bits of it.
    """
    place_H = row * heads + head_H
    highest_H = tl.load(norms + place_H, mask=head_H < heads, other=float("inf"))
    sums = norms + tl.num_programs(0).to(tl.int64) * heads
    return highest_H, tl.load(sums + place_H, mask=head_H < heads, other=1.0)


@triton.jit
def _chosen(indices, row, top_k, start, stride, K: tl.constexpr):
    """Of a tile of the query's keys: which are keys, and where they begin among those of its batch row, in 32 bits."""
    place_K = start + tl.arange(0, K)
    index_K = tl.load(indices + row * top_k + place_K, mask=place_K < top_k, other=-1)
    return index_K >= 0, tl.maximum(index_K, 0) * stride


@triton.jit
def _load_keys(keys, begin_K, is_key_K, column, width, C: tl.constexpr):
    column_C = tl.arange(0, C)
    inside_KC = is_key_K[:, None] & (column_C < width)[None, :]
    return tl.load(keys + (begin_K[:, None] + (column + column_C)[None, :]), mask=inside_KC, other=0.0)


@triton.jit
def forward_kernel(
    query,
    keys,
    indices,
    output,
    norms,
    scaling,
    queries,
    count,
    heads,
    top_k,
    width,
    value_width,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    R: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``scaling`` is for powers of two, in which the highest logit is too; that is ``inf`` for a query without keys."""
    row = tl.program_id(0).to(tl.int64)
    head_H = tl.program_id(1) * H + tl.arange(0, H)
    keys += row // queries * count * width
    query_HV = _load_heads(query, row, head_H, heads, width, 0, value_width, V)
    query_HR = _load_heads(query, row, head_H, heads, width, value_width, width - value_width, R)
    highest_H = tl.full([H], float("-inf"), dtype=tl.float32)
    sum_H = tl.zeros([H], dtype=tl.float32)
    output_HV = tl.zeros([H, V], dtype=tl.float32)
    for start in range(0, top_k, K):
        is_key_K, begin_K = _chosen(indices, row, top_k, start, width, K)
        key_KV = _load_keys(keys, begin_K, is_key_K, 0, value_width, V)
        key_KR = _load_keys(keys, begin_K, is_key_K, value_width, width - value_width, R)
        logit_HK = tl.dot(query_HV, tl.trans(key_KV), input_precision=PRECISION)
        logit_HK = tl.dot(query_HR, tl.trans(key_KR), logit_HK, input_precision=PRECISION) * scaling
        logit_HK = tl.where(is_key_K[None, :], logit_HK, float("-inf"))
        further_H = tl.maximum(highest_H, tl.max(logit_HK, 1))
        finite_H = tl.where(further_H == float("-inf"), 0.0, further_H)
        weight_HK = tl.exp2(logit_HK - finite_H[:, None])
        shrink_H = tl.exp2(highest_H - finite_H)
        sum_H = sum_H * shrink_H + tl.sum(weight_HK, 1)
        output_HV = tl.dot(weight_HK.to(key_KV.dtype), key_KV, output_HV * shrink_H[:, None], input_precision=PRECISION)
        highest_H = further_H
    is_empty_H = sum_H == 0.0
    sum_H = tl.where(is_empty_H, 1.0, sum_H)
    _store_heads(output, output_HV / sum_H[:, None], row, head_H, heads, value_width, 0, value_width, V)
    highest_H = tl.where(is_empty_H, float("inf"), highest_H)
    place_H = row * heads + head_H
    tl.store(norms + place_H, highest_H, mask=head_H < heads)
    tl.store(norms + tl.num_programs(0).to(tl.int64) * heads + place_H, sum_H, mask=head_H < heads)


@triton.jit
def target_kernel(
    query,
    keys,
    indices,
    norms,
    target,
    scaling,
    queries,
    count,
    heads,
    top_k,
    width,
    value_width,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    R: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The mean of all heads' weights of a tile of a query's keys; 0 where no key is."""
    row, start = tl.program_id(0).to(tl.int64), tl.program_id(1) * K
    keys += row // queries * count * width
    is_key_K, begin_K = _chosen(indices, row, top_k, start, width, K)
    key_KV = _load_keys(keys, begin_K, is_key_K, 0, value_width, V)
    key_KR = _load_keys(keys, begin_K, is_key_K, value_width, width - value_width, R)
    sum_K = tl.zeros([K], dtype=tl.float32)
    for first in range(0, heads, H):
        head_H = first + tl.arange(0, H)
        query_HV = _load_heads(query, row, head_H, heads, width, 0, value_width, V)
        query_HR = _load_heads(query, row, head_H, heads, width, value_width, width - value_width, R)
        highest_H, sum_H = _load_norms(norms, row, head_H, heads)
        logit_HK = tl.dot(query_HV, tl.trans(key_KV), input_precision=PRECISION)
        logit_HK = tl.dot(query_HR, tl.trans(key_KR), logit_HK, input_precision=PRECISION) * scaling
        sum_K += tl.sum(tl.exp2(logit_HK - highest_H[:, None]) / sum_H[:, None], 0)
    place_K = start + tl.arange(0, K)
    tl.store(target + row * top_k + place_K, tl.where(is_key_K, sum_K / heads, 0.0), mask=place_K < top_k)


@triton.jit
def gradients_kernel(
    query,
    keys,
    indices,
    output,
    norms,
    doutput,
    dquery,
    dkeys,
    scaling,
    by_two,
    queries,
    count,
    heads,
    top_k,
    width,
    value_width,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    R: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``dquery``, and this query's part of ``dkeys`` in float32, added by atomics: in any order."""
    row = tl.program_id(0).to(tl.int64)
    keys += row // queries * count * width
    dkeys += row // queries * count * width
    head_H = tl.program_id(1) * H + tl.arange(0, H)
    query_HV = _load_heads(query, row, head_H, heads, width, 0, value_width, V)
    query_HR = _load_heads(query, row, head_H, heads, width, value_width, width - value_width, R)
    upstream_HV = _load_heads(doutput, row, head_H, heads, value_width, 0, value_width, V)
    output_HV = _load_heads(output, row, head_H, heads, value_width, 0, value_width, V)
    mean_H = tl.sum(upstream_HV.to(tl.float32) * output_HV.to(tl.float32), 1)
    highest_H, sum_H = _load_norms(norms, row, head_H, heads)
    dquery_HV = tl.zeros([H, V], dtype=tl.float32)
    dquery_HR = tl.zeros([H, R], dtype=tl.float32)
    column_V, column_R = tl.arange(0, V), tl.arange(0, R)
    for start in range(0, top_k, K):
        is_key_K, begin_K = _chosen(indices, row, top_k, start, width, K)
        key_KV = _load_keys(keys, begin_K, is_key_K, 0, value_width, V)
        key_KR = _load_keys(keys, begin_K, is_key_K, value_width, width - value_width, R)
        logit_HK = tl.dot(query_HV, tl.trans(key_KV), input_precision=PRECISION)
        logit_HK = tl.dot(query_HR, tl.trans(key_KR), logit_HK, input_precision=PRECISION) * by_two
        is_key_HK = is_key_K[None, :] & (head_H < heads)[:, None]
        weight_HK = tl.where(is_key_HK, tl.exp2(logit_HK - highest_H[:, None]) / sum_H[:, None], 0.0)
        dweight_HK = tl.dot(upstream_HV, tl.trans(key_KV), input_precision=PRECISION)
        dlogit_HK = tl.where(is_key_HK, weight_HK * (dweight_HK - mean_H[:, None]) * scaling, 0.0)
        rounded_HK = dlogit_HK.to(key_KV.dtype)
        dquery_HV = tl.dot(rounded_HK, key_KV, dquery_HV, input_precision=PRECISION)
        dquery_HR = tl.dot(rounded_HK, key_KR, dquery_HR, input_precision=PRECISION)
        # Transposed, so that columns, of which there are many, are the rows of the product: matrix units take 64.
        dkey_VK = tl.dot(tl.trans(query_HV), rounded_HK, input_precision=PRECISION)
        dkey_VK = tl.dot(tl.trans(upstream_HV), weight_HK.to(key_KV.dtype), dkey_VK, input_precision=PRECISION)
        dkey_RK = tl.dot(tl.trans(query_HR), rounded_HK, input_precision=PRECISION)
        inside_VK = (column_V < value_width)[:, None] & is_key_K[None, :]
        inside_RK = (column_R < width - value_width)[:, None] & is_key_K[None, :]
        tl.atomic_add(dkeys + (begin_K[None, :] + column_V[:, None]), dkey_VK, mask=inside_VK, sem="relaxed")
        place_RK = begin_K[None, :] + (value_width + column_R)[:, None]
        tl.atomic_add(dkeys + place_RK, dkey_RK, mask=inside_RK, sem="relaxed")
    _store_heads(dquery, dquery_HV, row, head_H, heads, width, 0, value_width, V)
    _store_heads(dquery, dquery_HR, row, head_H, heads, width, value_width, width - value_width, R)
