"""Attention of one query to its chosen keys, and its gradients: products of its heads with rows that are gathered.

All heads of a query have the same keys, so each kernel is a product of matrices for one query. What lies between two
of them (weights, gradients of logits) goes through memory, for some queries at a time: in one kernel, the accumulators
of both products filled the registers, and 64 heads were half of what two groups of four warps take (H100, 16384
tokens of 128 heads and 2048 keys: 357 ms of gradients in one kernel).

Shape legend: ``H`` heads and ``K`` keys of a tile, ``C`` columns of a step or a tile, ``N`` tiles of a query's keys.
"""

from __future__ import annotations

import triton
import triton.language as tl

from veomni_ops.triton_launches import triton_kernel


@triton.jit
def _load_heads(x, row, head_H, heads, stride, column_C, end):
    """``[H, C]`` of a query, whose heads are ``stride`` long each; columns from ``end`` on are zeros."""
    inside_HC = (head_H < heads)[:, None] & (column_C < end)[None, :]
    place_HC = (row * heads + head_H.to(tl.int64))[:, None] * stride + column_C[None, :]
    return tl.load(x + place_HC, mask=inside_HC, other=0.0)


@triton.jit
def _load_norms(highest, sums, row, head_H, heads):
    """A query's highest logits and its sums ``[H]``; weights of heads beyond its own become zeros.

    The logarithm of the sum is not added to the highest: beside a logit of 1e6, float32 would keep four bits of it.
    """
    place_H = row * heads + head_H
    highest_H = tl.load(highest + place_H, mask=head_H < heads, other=float("inf"))
    return highest_H, tl.load(sums + place_H, mask=head_H < heads, other=1.0)


@triton.jit
def _chosen(indices, row, top_k, place_K, stride):
    """Of a tile of the query's keys: which are keys, and where they begin among those of its batch row, in 32 bits."""
    index_K = tl.load(indices + row * top_k + place_K, mask=place_K < top_k, other=-1)
    return index_K >= 0, tl.maximum(index_K, 0) * stride


@triton.jit
def _load_keys(keys, begin_K, is_key_K, column_C, end):
    inside_KC = is_key_K[:, None] & (column_C < end)[None, :]
    return tl.load(keys + (begin_K[:, None] + column_C[None, :]), mask=inside_KC, other=0.0)


@triton.jit
def _add_logits(
    logit_HK, query, keys, row, head_H, heads, begin_K, is_key_K, start, width, C: tl.constexpr, PRECISION: tl.constexpr
):
    """``logit_HK`` and each head's product with each key over the columns from ``start`` on, ``C`` at a time."""
    for column in range(start, width, C):
        column_C = column + tl.arange(0, C)
        query_HC = _load_heads(query, row, head_H, heads, width, column_C, width)
        key_KC = _load_keys(keys, begin_K, is_key_K, column_C, width)
        logit_HK = tl.dot(query_HC, tl.trans(key_KC), logit_HK, input_precision=PRECISION)
    return logit_HK


@triton.jit
def _add_to_keys(dkeys, dkey_KC, begin_K, is_key_K, column_C, end):
    """Add ``[K, C]`` to the gradients of keys by atomics, in any order."""
    inside_KC = is_key_K[:, None] & (column_C < end)[None, :]
    tl.atomic_add(dkeys + (begin_K[:, None] + column_C[None, :]), dkey_KC, mask=inside_KC, sem="relaxed")


@triton.jit
def _weight_places(head_H, heads, place_K, top_k):
    """Where a tile of weights ``[rows, heads, top_k]`` of a part of the queries is, and what of it."""
    row = tl.program_id(0).to(tl.int64)
    inside_HK = (head_H < heads)[:, None] & (place_K < top_k)[None, :]
    return (row * heads + head_H)[:, None] * top_k + place_K[None, :], inside_HK


@triton_kernel(do_not_specialize=["first"])
def weights_kernel(
    query,
    keys,
    indices,
    weights,
    tile_highest,
    tile_sums,
    by_two,
    first,
    queries,
    count,
    heads,
    top_k,
    width,
    H: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Weights of queries from ``first`` on, relative to the highest logit of their tile; that, and their sum, by tile.

    Logits are scaled after the highest was subtracted, so that this rounds no large ones. It is ``-inf`` without keys.
    """
    row = first + tl.program_id(0).to(tl.int64)
    keys += row // queries * count * width
    tile = tl.program_id(1)
    place_K, head_H = tile * K + tl.arange(0, K), tl.program_id(2) * H + tl.arange(0, H)
    is_key_K, begin_K = _chosen(indices, row, top_k, place_K, width)
    logit_HK = tl.zeros([H, K], dtype=tl.float32)
    logit_HK = _add_logits(logit_HK, query, keys, row, head_H, heads, begin_K, is_key_K, 0, width, C, PRECISION)
    logit_HK = tl.where(is_key_K[None, :], logit_HK, float("-inf"))
    highest_H = tl.max(logit_HK, 1)
    finite_H = tl.where(highest_H == float("-inf"), 0.0, highest_H)
    weight_HK = tl.exp2((logit_HK - finite_H[:, None]) * by_two)
    place_HK, inside_HK = _weight_places(head_H, heads, place_K, top_k)
    tl.store(weights + place_HK, weight_HK.to(weights.dtype.element_ty), mask=inside_HK)
    place_H = (tl.program_id(0) * tl.num_programs(1) + tile) * heads + head_H
    tl.store(tile_highest + place_H, highest_H, mask=head_H < heads)
    tl.store(tile_sums + place_H, tl.sum(weight_HK, 1), mask=head_H < heads)


@triton_kernel(do_not_specialize=["first"])
def outputs_kernel(
    weights,
    keys,
    indices,
    tile_highest,
    tile_sums,
    output,
    highest,
    sums,
    by_two,
    first,
    queries,
    count,
    heads,
    top_k,
    width,
    value_width,
    tiles,
    H: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``C`` columns of the output of queries from ``first`` on, and their norms; ``TILE`` keys have a highest logit.

    A query without keys has the norms ``inf`` and 1.
    """
    row = first + tl.program_id(0).to(tl.int64)
    keys += row // queries * count * width
    column_C, head_H = tl.program_id(1) * C + tl.arange(0, C), tl.program_id(2) * H + tl.arange(0, H)
    place_H = tl.program_id(0) * tiles * heads + head_H
    highest_H, sum_H = tl.full([H], float("-inf"), dtype=tl.float32), tl.zeros([H], dtype=tl.float32)
    for tile in range(tiles):
        highest_H = tl.maximum(
            highest_H, tl.load(tile_highest + place_H + tile * heads, mask=head_H < heads, other=float("-inf"))
        )
    highest_H = tl.where(highest_H == float("-inf"), 0.0, highest_H)
    for tile in range(tiles):
        scale_H = tl.load(tile_highest + place_H + tile * heads, mask=head_H < heads, other=float("-inf")) - highest_H
        scale_H = tl.exp2(scale_H * by_two)
        sum_H += tl.load(tile_sums + place_H + tile * heads, mask=head_H < heads, other=0.0) * scale_H
    output_HC = tl.zeros([H, C], dtype=tl.float32)
    for start in range(0, top_k, K):
        place_K = start + tl.arange(0, K)
        is_key_K, begin_K = _chosen(indices, row, top_k, place_K, width)
        key_KC = _load_keys(keys, begin_K, is_key_K, column_C, value_width)
        place_HK, inside_HK = _weight_places(head_H, heads, place_K, top_k)
        weight_HK = tl.load(weights + place_HK, mask=inside_HK, other=0.0)
        place = tile_highest + place_H + start // TILE * heads
        scale_H = tl.exp2((tl.load(place, mask=head_H < heads, other=float("-inf")) - highest_H) * by_two)
        weight_HK = (weight_HK * scale_H[:, None]).to(key_KC.dtype)
        output_HC = tl.dot(weight_HK, key_KC, output_HC, input_precision=PRECISION)
    is_empty_H = sum_H == 0.0
    sum_H = tl.where(is_empty_H, 1.0, sum_H)
    inside_HC = (head_H < heads)[:, None] & (column_C < value_width)[None, :]
    place_HC = (row * heads + head_H)[:, None] * value_width + column_C[None, :]
    tl.store(output + place_HC, (output_HC / sum_H[:, None]).to(output.dtype.element_ty), mask=inside_HC)
    if tl.program_id(1) == 0:
        tl.store(highest + row * heads + head_H, tl.where(is_empty_H, float("inf"), highest_H), mask=head_H < heads)
        tl.store(sums + row * heads + head_H, sum_H, mask=head_H < heads)


@triton_kernel
def target_kernel(
    query,
    keys,
    indices,
    highest,
    sums,
    target,
    by_two,
    queries,
    count,
    heads,
    top_k,
    width,
    H: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The mean of all heads' weights of a tile of a query's keys; 0 where no key is."""
    row = tl.program_id(0).to(tl.int64)
    keys += row // queries * count * width
    place_K = tl.program_id(1) * K + tl.arange(0, K)
    is_key_K, begin_K = _chosen(indices, row, top_k, place_K, width)
    sum_K = tl.zeros([K], dtype=tl.float32)
    for start in range(0, heads, H):
        head_H = start + tl.arange(0, H)
        highest_H, sum_H = _load_norms(highest, sums, row, head_H, heads)
        logit_HK = tl.zeros([H, K], dtype=tl.float32)
        logit_HK = _add_logits(logit_HK, query, keys, row, head_H, heads, begin_K, is_key_K, 0, width, C, PRECISION)
        sum_K += tl.sum(tl.exp2((logit_HK - highest_H[:, None]) * by_two) / sum_H[:, None], 0)
    tl.store(target + row * top_k + place_K, tl.where(is_key_K, sum_K / heads, 0.0), mask=place_K < top_k)


@triton_kernel
def means_kernel(output, doutput, means, rows, value_width, H: tl.constexpr, C: tl.constexpr):
    """The product of each query's and head's output with its gradient: the mean of its weights' gradients."""
    row_H, column_C = tl.program_id(0).to(tl.int64) * H + tl.arange(0, H), tl.arange(0, C)
    inside_HC = (row_H < rows)[:, None] & (column_C < value_width)[None, :]
    place_HC = row_H[:, None] * value_width + column_C[None, :]
    output_HC = tl.load(output + place_HC, mask=inside_HC, other=0.0).to(tl.float32)
    upstream_HC = tl.load(doutput + place_HC, mask=inside_HC, other=0.0).to(tl.float32)
    tl.store(means + row_H, tl.sum(output_HC * upstream_HC, 1), mask=row_H < rows)


@triton_kernel(do_not_specialize=["first"])
def logit_gradients_kernel(
    query,
    keys,
    indices,
    highest,
    sums,
    means,
    doutput,
    weights,
    dlogits,
    scaling,
    by_two,
    first,
    queries,
    count,
    heads,
    top_k,
    width,
    value_width,
    H: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Weights of queries from ``first`` on, and gradients of their products with keys, of a tile of these."""
    row = first + tl.program_id(0).to(tl.int64)
    keys += row // queries * count * width
    place_K, head_H = tl.program_id(1) * K + tl.arange(0, K), tl.program_id(2) * H + tl.arange(0, H)
    is_key_K, begin_K = _chosen(indices, row, top_k, place_K, width)
    logit_HK = tl.zeros([H, K], dtype=tl.float32)
    dweight_HK = tl.zeros([H, K], dtype=tl.float32)
    for column in range(0, value_width, C):
        column_C = column + tl.arange(0, C)
        query_HC = _load_heads(query, row, head_H, heads, width, column_C, value_width)
        upstream_HC = _load_heads(doutput, row, head_H, heads, value_width, column_C, value_width)
        key_KC = _load_keys(keys, begin_K, is_key_K, column_C, value_width)
        logit_HK = tl.dot(query_HC, tl.trans(key_KC), logit_HK, input_precision=PRECISION)
        dweight_HK = tl.dot(upstream_HC, tl.trans(key_KC), dweight_HK, input_precision=PRECISION)
    logit_HK = _add_logits(
        logit_HK, query, keys, row, head_H, heads, begin_K, is_key_K, value_width, width, C, PRECISION
    )
    highest_H, sum_H = _load_norms(highest, sums, row, head_H, heads)
    mean_H = tl.load(means + row * heads + head_H, mask=head_H < heads, other=0.0)
    weight_HK = tl.where(is_key_K[None, :], tl.exp2((logit_HK - highest_H[:, None]) * by_two) / sum_H[:, None], 0.0)
    if tl.num_programs(1) == 1:  # `means` are of the output, which was rounded
        total_H = tl.sum(weight_HK, 1)  # 1 but for what large logits are rounded by, or 0 without keys
        mean_H = tl.sum(weight_HK * dweight_HK, 1) / tl.where(total_H == 0.0, 1.0, total_H)
    dlogit_HK = weight_HK * (dweight_HK - mean_H[:, None]) * scaling
    place_HK, inside_HK = _weight_places(head_H, heads, place_K, top_k)
    tl.store(weights + place_HK, weight_HK.to(weights.dtype.element_ty), mask=inside_HK)
    tl.store(dlogits + place_HK, dlogit_HK.to(dlogits.dtype.element_ty), mask=inside_HK)


@triton_kernel(do_not_specialize=["first"])
def query_gradients_kernel(
    dlogits,
    keys,
    indices,
    dquery,
    first,
    queries,
    count,
    heads,
    top_k,
    width,
    H: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``C`` columns of the gradients of queries from ``first`` on."""
    row = first + tl.program_id(0).to(tl.int64)
    keys += row // queries * count * width
    column_C, head_H = tl.program_id(1) * C + tl.arange(0, C), tl.program_id(2) * H + tl.arange(0, H)
    dquery_HC = tl.zeros([H, C], dtype=tl.float32)
    for start in range(0, top_k, K):
        place_K = start + tl.arange(0, K)
        is_key_K, begin_K = _chosen(indices, row, top_k, place_K, width)
        key_KC = _load_keys(keys, begin_K, is_key_K, column_C, width)
        place_HK, inside_HK = _weight_places(head_H, heads, place_K, top_k)
        dlogit_HK = tl.load(dlogits + place_HK, mask=inside_HK, other=0.0)
        dquery_HC = tl.dot(dlogit_HK, key_KC, dquery_HC, input_precision=PRECISION)
    inside_HC = (head_H < heads)[:, None] & (column_C < width)[None, :]
    place_HC = (row * heads + head_H)[:, None] * width + column_C[None, :]
    tl.store(dquery + place_HC, dquery_HC.to(dquery.dtype.element_ty), mask=inside_HC)


@triton_kernel(do_not_specialize=["first"])
def key_gradients_kernel(
    query,
    doutput,
    indices,
    weights,
    dlogits,
    dkeys,
    first,
    queries,
    count,
    heads,
    top_k,
    width,
    value_width,
    H: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A query's part of the gradients of a tile of its keys, added by atomics in float32: in any order."""
    row = first + tl.program_id(0).to(tl.int64)
    dkeys += row // queries * count * width
    place_K, head_H = tl.program_id(1) * K + tl.arange(0, K), tl.program_id(2) * H + tl.arange(0, H)
    is_key_K, begin_K = _chosen(indices, row, top_k, place_K, width)
    place_HK, inside_HK = _weight_places(head_H, heads, place_K, top_k)
    weight_HK = tl.load(weights + place_HK, mask=inside_HK, other=0.0)
    dlogit_HK = tl.load(dlogits + place_HK, mask=inside_HK, other=0.0)
    for column in range(0, value_width, C):
        column_C = column + tl.arange(0, C)
        query_HC = _load_heads(query, row, head_H, heads, width, column_C, value_width)
        upstream_HC = _load_heads(doutput, row, head_H, heads, value_width, column_C, value_width)
        dkey_KC = tl.dot(tl.trans(dlogit_HK), query_HC, input_precision=PRECISION)
        dkey_KC = tl.dot(tl.trans(weight_HK), upstream_HC, dkey_KC, input_precision=PRECISION)
        _add_to_keys(dkeys, dkey_KC, begin_K, is_key_K, column_C, value_width)
    for column in range(value_width, width, C):
        column_C = column + tl.arange(0, C)
        query_HC = _load_heads(query, row, head_H, heads, width, column_C, width)
        dkey_KC = tl.dot(tl.trans(dlogit_HK), query_HC, input_precision=PRECISION)
        _add_to_keys(dkeys, dkey_KC, begin_K, is_key_K, column_C, width)
