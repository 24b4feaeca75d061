"""Branches of native sparse attention: over a range of keys for each query, and over blocks that each has chosen.

Of both ranges' ends, none is before that of an earlier query. Norms are logarithms of sums, to base 2.

Shape legend: ``M`` queries of a tile (of one head, or of all heads of a key head), ``N`` keys of a tile, ``H`` heads of
a key head, ``D`` columns of keys and ``V`` of values, padded to powers of two. Keys of other widths have ``E`` columns
more, if ``SPLIT``: 192 are 128 and 64.
"""

from __future__ import annotations

import triton
import triton.language as tl

LARGEST = tl.constexpr(3.4028234663852886e38)  # of float32


@triton.jit
def _load(x, row_M, is_row_M, width, C: tl.constexpr, FIRST: tl.constexpr = 0):
    """``[M, C]`` of rows of ``width`` numbers, from the column ``FIRST`` on; zeros where none is."""
    column_C = FIRST + tl.arange(0, C)
    inside_MC = is_row_M[:, None] & (column_C < width)[None, :]
    return tl.load(x + (row_M.to(tl.int64)[:, None] * width + column_C[None, :]), mask=inside_MC, other=0.0)


@triton.jit
def _store(x, tile_MC, row_M, is_row_M, width, C: tl.constexpr, FIRST: tl.constexpr = 0):
    column_C = FIRST + tl.arange(0, C)
    inside_MC = is_row_M[:, None] & (column_C < width)[None, :]
    place_MC = x + (row_M.to(tl.int64)[:, None] * width + column_C[None, :])
    tl.store(place_MC, tile_MC.to(x.dtype.element_ty), mask=inside_MC)


@triton.jit
def _load_wide(x, row_M, is_row_M, width, D: tl.constexpr, E: tl.constexpr, SPLIT: tl.constexpr):
    """Rows of queries or keys, in two parts; if not ``SPLIT``, the second is not read."""
    x_MD = _load(x, row_M, is_row_M, width, D)
    x_ME = _load(x, row_M, is_row_M, width, E, D) if SPLIT else x_MD
    return x_MD, x_ME


@triton.jit
def _store_wide(x, x_MD, x_ME, row_M, is_row_M, width, D: tl.constexpr, E: tl.constexpr, SPLIT: tl.constexpr):
    _store(x, x_MD, row_M, is_row_M, width, D)
    if SPLIT:
        _store(x, x_ME, row_M, is_row_M, width, E, D)


@triton.jit
def _products(x_MD, x_ME, y_ND, y_NE, SPLIT: tl.constexpr, PRECISION: tl.constexpr):
    """``[M, N]``: each row of ``x`` times each of ``y``."""
    product_MN = tl.dot(x_MD, tl.trans(y_ND), input_precision=PRECISION)
    if SPLIT:
        product_MN = tl.dot(x_ME, tl.trans(y_NE), product_MN, input_precision=PRECISION)
    return product_MN


@triton.jit
def _add_rows(sum_MD, sum_ME, weight_MN, y_ND, y_NE, SPLIT: tl.constexpr, PRECISION: tl.constexpr):
    """The sums with rows of ``y`` more, times weights."""
    sum_MD = tl.dot(weight_MN, y_ND, sum_MD, input_precision=PRECISION)
    if SPLIT:
        sum_ME = tl.dot(weight_MN, y_NE, sum_ME, input_precision=PRECISION)
    return sum_MD, sum_ME


@triton.jit
def _upstream(gates, norms, means, row_M, is_row_M):
    """Of a branch ``[M]``: its gates and norms, and the means of its weights' gradients."""
    gate_M = tl.load(gates + row_M * 3, mask=is_row_M, other=0.0).to(tl.float32)
    norm_M = tl.load(norms + row_M, mask=is_row_M, other=float("inf"))
    return gate_M, norm_M, tl.load(means + row_M, mask=is_row_M, other=0.0)


@triton.jit
def _attend(logit_MN, value_NV, seen_MN, highest_M, sum_M, output_MV, PRECISION: tl.constexpr):
    """The running highest logit, sum and output, with a tile of keys more."""
    logit_MN = tl.where(seen_MN, logit_MN, float("-inf"))
    further_M = tl.maximum(highest_M, tl.max(logit_MN, 1))
    finite_M = tl.where(further_M == float("-inf"), 0.0, further_M)
    weight_MN = tl.exp2(logit_MN - finite_M[:, None])
    shrink_M = tl.exp2(highest_M - finite_M)
    sum_M = sum_M * shrink_M + tl.sum(weight_MN, 1)
    output_MV = output_MV * shrink_M[:, None]
    output_MV = tl.dot(weight_MN.to(value_NV.dtype), value_NV, output_MV, input_precision=PRECISION)
    return further_M, sum_M, output_MV


@triton.jit
def _finish(output, norms, highest_M, sum_M, output_MV, row_M, is_row_M, width, V: tl.constexpr):
    """Write the output and the norms, of queries without a key zeros and ``inf``."""
    is_empty_M = sum_M == 0.0
    sum_M = tl.where(is_empty_M, 1.0, sum_M)
    _store(output, output_MV / sum_M[:, None], row_M, is_row_M, width, V)
    norm_M = tl.where(is_empty_M, float("inf"), highest_M + tl.log2(sum_M))
    tl.store(norms + row_M, norm_M, mask=is_row_M)


@triton.jit
def _dlogits(logit_MN, value_NV, upstream_MV, gate_M, norm_M, mean_M, seen_MN, scaling, PRECISION: tl.constexpr):
    """The gradients of a tile's logits; ``upstream`` is that of all branches together."""
    weight_MN = tl.where(seen_MN, tl.exp2(logit_MN - norm_M[:, None]), 0.0)
    dweight_MN = tl.dot(upstream_MV, tl.trans(value_NV), input_precision=PRECISION) * gate_M[:, None]
    return tl.where(seen_MN, weight_MN * (dweight_MN - mean_M[:, None]) * scaling, 0.0)


@triton.jit
def _weights_of_keys(
    logit_NM, value_NV, upstream_MV, gate_M, norm_M, mean_M, seen_NM, scaling, dvalue_NV, PRECISION: tl.constexpr
):
    """The gradients of a tile's logits, and those of its values with a tile of queries more."""
    weight_NM = tl.where(seen_NM, tl.exp2(logit_NM - norm_M[None, :]), 0.0)
    gated_NM = (weight_NM * gate_M[None, :]).to(upstream_MV.dtype)
    dvalue_NV = tl.dot(gated_NM, upstream_MV, dvalue_NV, input_precision=PRECISION)
    dweight_NM = tl.dot(value_NV, tl.trans(upstream_MV), input_precision=PRECISION) * gate_M[None, :]
    return tl.where(seen_NM, weight_NM * (dweight_NM - mean_M[None, :]) * scaling, 0.0), dvalue_NV


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


@triton.jit
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
    width,
    value_width,
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
    query_MD, query_ME = _load_wide(query, row_M, is_token_M, width, D, E, SPLIT)
    highest_M = tl.full([M], float("-inf"), dtype=tl.float32)
    sum_M = tl.zeros([M], dtype=tl.float32)
    output_MV = tl.zeros([M, V], dtype=tl.float32)
    for start in range(first, last, N):
        key_N = start + tl.arange(0, N)
        row_N = key_N.to(tl.int64) * groups + group
        key_ND, key_NE = _load_wide(key, row_N, key_N < last, width, D, E, SPLIT)
        value_NV = _load(value, row_N, key_N < last, value_width, V)
        seen_MN = (key_N[None, :] >= begin_M[:, None]) & (key_N[None, :] < stop_M[:, None])
        logit_MN = _products(query_MD, query_ME, key_ND, key_NE, SPLIT, PRECISION) * scaling
        highest_M, sum_M, output_MV = _attend(logit_MN, value_NV, seen_MN, highest_M, sum_M, output_MV, PRECISION)
    _finish(output, norms, highest_M, sum_M, output_MV, row_M, is_token_M, value_width, V)


@triton.jit
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
    width,
    value_width,
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
    query_MD, query_ME = _load_wide(query, row_M, is_token_M, width, D, E, SPLIT)
    upstream_MV = _load(doutput, row_M, is_token_M, value_width, V)
    gate_M, norm_M, mean_M = _upstream(gates, norms, means, row_M, is_token_M)
    dquery_MD = tl.zeros([M, D], dtype=tl.float32)
    dquery_ME = tl.zeros([M, E], dtype=tl.float32)
    for start in range(first, last, N):
        key_N = start + tl.arange(0, N)
        row_N = key_N.to(tl.int64) * groups + group
        key_ND, key_NE = _load_wide(key, row_N, key_N < last, width, D, E, SPLIT)
        value_NV = _load(value, row_N, key_N < last, value_width, V)
        seen_MN = (key_N[None, :] >= begin_M[:, None]) & (key_N[None, :] < stop_M[:, None])
        logit_MN = _products(query_MD, query_ME, key_ND, key_NE, SPLIT, PRECISION) * by_two
        dlogit_MN = _dlogits(logit_MN, value_NV, upstream_MV, gate_M, norm_M, mean_M, seen_MN, scaling, PRECISION)
        dquery_MD, dquery_ME = _add_rows(
            dquery_MD, dquery_ME, dlogit_MN.to(key_ND.dtype), key_ND, key_NE, SPLIT, PRECISION
        )
    former_MD, former_ME = _load_wide(dquery, row_M, is_token_M, width, D, E, SPLIT)
    dquery_MD += former_MD.to(tl.float32)
    if SPLIT:
        dquery_ME += former_ME.to(tl.float32)
    _store_wide(dquery, dquery_MD, dquery_ME, row_M, is_token_M, width, D, E, SPLIT)


@triton.jit
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
    width,
    value_width,
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
    key_ND, key_NE = _load_wide(key, row_N, is_key_N, width, D, E, SPLIT)
    value_NV = _load(value, row_N, is_key_N, value_width, V)
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
            query_MD, query_ME = _load_wide(query, row_M, is_token_M, width, D, E, SPLIT)
            upstream_MV = _load(doutput, row_M, is_token_M, value_width, V)
            gate_M, norm_M, mean_M = _upstream(gates, norms, means, row_M, is_token_M)
            seen_NM = (key_N[:, None] >= begin_M[None, :]) & (key_N[:, None] < stop_M[None, :]) & is_key_N[:, None]
            logit_NM = _products(key_ND, key_NE, query_MD, query_ME, SPLIT, PRECISION) * by_two
            dlogit_NM, dvalue_NV = _weights_of_keys(
                logit_NM, value_NV, upstream_MV, gate_M, norm_M, mean_M, seen_NM, scaling, dvalue_NV, PRECISION
            )
            dkey_ND, dkey_NE = _add_rows(
                dkey_ND, dkey_NE, dlogit_NM.to(query_MD.dtype), query_MD, query_ME, SPLIT, PRECISION
            )
    row_N += tl.program_id(2).to(tl.int64) * keys * groups
    _store_wide(dkey, dkey_ND, dkey_NE, row_N, is_key_N, width, D, E, SPLIT)
    _store(dvalue, dvalue_NV, row_N, is_key_N, value_width, V)


@triton.jit
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
    width,
    scaling,
    M: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``sums[G, rows, keys]``: the weights of some queries, summed over the heads of each key head.

    What no query of a tile sees is left as it is.
    """
    group = tl.program_id(2)
    row_M, key_N = tl.program_id(0) * M + tl.arange(0, M), tl.program_id(1) * N + tl.arange(0, N)
    is_row_M, is_key_N = row_M < rows, key_N < keys
    token_M = (first_token + row_M).to(tl.int64)
    begin_M = tl.load(begins + token_M, mask=is_row_M, other=0)
    stop_M = tl.load(stops + token_M, mask=is_row_M, other=0)
    seen_MN = (key_N[None, :] >= begin_M[:, None]) & (key_N[None, :] < stop_M[:, None]) & is_key_N[None, :]
    if tl.max(tl.max(seen_MN.to(tl.int32), 1), 0) > 0:
        key_ND, key_NE = _load_wide(key, key_N.to(tl.int64) * groups + group, is_key_N, width, D, E, SPLIT)
        sum_MN = tl.zeros([M, N], dtype=tl.float32)
        per_group = heads // groups
        for head in range(group * per_group, (group + 1) * per_group):
            at_M = token_M * heads + head
            query_MD, query_ME = _load_wide(query, at_M, is_row_M, width, D, E, SPLIT)
            norm_M = tl.load(norms + at_M, mask=is_row_M, other=float("inf"))
            logit_MN = _products(query_MD, query_ME, key_ND, key_NE, SPLIT, PRECISION) * scaling
            sum_MN += tl.exp2(logit_MN - norm_M[:, None])
        into_MN = sums + (group.to(tl.int64) * rows + row_M[:, None]) * keys + key_N[None, :]
        tl.store(into_MN, sum_MN, mask=seen_MN & is_row_M[:, None])


@triton.jit
def choose_kernel(
    sums,
    begins,
    stops,
    own_blocks,
    chosen,
    first_token,
    rows,
    keys,
    groups,
    count,
    long,
    wide,
    first_blocks,
    last_blocks,
    R: tl.constexpr,
    N: tl.constexpr,
):
    """Write each query's blocks, rising: its first and last ones, and those of the highest scores, of equal ones the
    first. A program has ``R`` queries; a compressed key is ``long`` strides, a block ``wide``.
    """
    group = tl.program_id(1)
    row_R, block_N = tl.program_id(0) * R + tl.arange(0, R), tl.arange(0, N)
    is_row_R = row_R < rows
    token_R = (first_token + row_R).to(tl.int64)
    begin_R = tl.load(begins + token_R, mask=is_row_R, other=0)
    stop_R = tl.load(stops + token_R, mask=is_row_R, other=0)
    own_R = tl.load(own_blocks + token_R, mask=is_row_R, other=-1)
    sums_R = sums + (group.to(tl.int64) * rows + row_R) * keys
    score_RN = tl.zeros([R, N], dtype=tl.float32)
    for place in range(1 - long, wide):
        key_RN = begin_R[:, None] + (block_N * wide + place)[None, :]
        is_key_RN = (key_RN >= begin_R[:, None]) & (key_RN < stop_R[:, None])
        shared = (tl.minimum(place + long, wide) - tl.maximum(place, 0)).to(tl.float32)
        score_RN += tl.load(sums_R[:, None] + key_RN, mask=is_key_RN, other=0.0) * shared
    score_RN = tl.where(score_RN == score_RN, score_RN, LARGEST)
    is_always_RN = (block_N < first_blocks)[None, :] | (block_N[None, :] > own_R[:, None] - last_blocks)
    score_RN = tl.where(is_always_RN, float("inf"), score_RN)
    score_RN = tl.where(block_N[None, :] <= own_R[:, None], score_RN, float("-inf"))
    is_chosen_RN = tl.zeros([R, N], dtype=tl.int32)
    for _ in range(count):
        highest_R = tl.max(score_RN, 1)
        at_RN = (score_RN == highest_R[:, None]) & (score_RN > float("-inf"))
        place_R = tl.min(tl.where(at_RN, block_N[None, :], N), 1)
        is_it_RN = block_N[None, :] == place_R[:, None]
        is_chosen_RN = tl.where(is_it_RN, 1, is_chosen_RN)
        score_RN = tl.where(is_it_RN, float("-inf"), score_RN)
    into_R = chosen + (token_R * groups + group) * count
    into_RN = into_R[:, None] + tl.cumsum(is_chosen_RN, 1) - 1
    tl.store(into_RN, tl.zeros([R, N], dtype=tl.int32) + block_N[None, :], mask=is_chosen_RN != 0)


@triton.jit
def _chosen_keys(chosen, begin, token, group, groups, count, place, block_size, N: tl.constexpr):
    block = tl.load(chosen + (token * groups + group) * count + place)
    column_N = tl.arange(0, N)
    key_N = begin + block * block_size + column_N
    return key_N, (block >= 0) & (column_N < block_size) & (key_N <= token)


@triton.jit
def chosen_forward_kernel(
    query,
    key,
    value,
    begins,
    chosen,
    output,
    norms,
    scaling,
    heads,
    groups,
    width,
    value_width,
    count,
    block_size,
    H: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    SPLIT: tl.constexpr,
    V: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attention of one query's heads of a key head to the keys of its blocks, up to its own."""
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head_H, per_group = tl.arange(0, H), heads // groups
    row_H, is_head_H = token * heads + group * per_group + head_H, head_H < per_group
    begin = tl.load(begins + token)
    query_HD, query_HE = _load_wide(query, row_H, is_head_H, width, D, E, SPLIT)
    highest_H = tl.full([H], float("-inf"), dtype=tl.float32)
    sum_H = tl.zeros([H], dtype=tl.float32)
    output_HV = tl.zeros([H, V], dtype=tl.float32)
    for place in range(count):
        key_N, is_key_N = _chosen_keys(chosen, begin, token, group, groups, count, place, block_size, N)
        row_N = key_N.to(tl.int64) * groups + group
        key_ND, key_NE = _load_wide(key, row_N, is_key_N, width, D, E, SPLIT)
        value_NV = _load(value, row_N, is_key_N, value_width, V)
        logit_HN = _products(query_HD, query_HE, key_ND, key_NE, SPLIT, PRECISION) * scaling
        highest_H, sum_H, output_HV = _attend(
            logit_HN, value_NV, is_key_N[None, :], highest_H, sum_H, output_HV, PRECISION
        )
    _finish(output, norms, highest_H, sum_H, output_HV, row_H, is_head_H, value_width, V)


@triton.jit
def chosen_dquery_kernel(
    query,
    key,
    value,
    begins,
    chosen,
    doutput,
    gates,
    norms,
    means,
    dquery,
    scaling,
    by_two,
    heads,
    groups,
    width,
    value_width,
    count,
    block_size,
    H: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    SPLIT: tl.constexpr,
    V: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write this branch's gradients to ``dquery``."""
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head_H, per_group = tl.arange(0, H), heads // groups
    row_H, is_head_H = token * heads + group * per_group + head_H, head_H < per_group
    begin = tl.load(begins + token)
    query_HD, query_HE = _load_wide(query, row_H, is_head_H, width, D, E, SPLIT)
    upstream_HV = _load(doutput, row_H, is_head_H, value_width, V)
    gate_H, norm_H, mean_H = _upstream(gates, norms, means, row_H, is_head_H)
    dquery_HD = tl.zeros([H, D], dtype=tl.float32)
    dquery_HE = tl.zeros([H, E], dtype=tl.float32)
    for place in range(count):
        key_N, is_key_N = _chosen_keys(chosen, begin, token, group, groups, count, place, block_size, N)
        row_N = key_N.to(tl.int64) * groups + group
        key_ND, key_NE = _load_wide(key, row_N, is_key_N, width, D, E, SPLIT)
        value_NV = _load(value, row_N, is_key_N, value_width, V)
        logit_HN = _products(query_HD, query_HE, key_ND, key_NE, SPLIT, PRECISION) * by_two
        dlogit_HN = _dlogits(
            logit_HN, value_NV, upstream_HV, gate_H, norm_H, mean_H, is_key_N[None, :], scaling, PRECISION
        )
        dquery_HD, dquery_HE = _add_rows(
            dquery_HD, dquery_HE, dlogit_HN.to(key_ND.dtype), key_ND, key_NE, SPLIT, PRECISION
        )
    _store_wide(dquery, dquery_HD, dquery_HE, row_H, is_head_H, width, D, E, SPLIT)


@triton.jit
def chosen_dkeys_kernel(
    query,
    key,
    value,
    doutput,
    gates,
    norms,
    means,
    takers,
    starts,
    parts_before,
    part_blocks,
    block_begins,
    block_stops,
    partial,
    scaling,
    by_two,
    taken,
    blocks,
    parts,
    heads,
    groups,
    width,
    value_width,
    block_size,
    part,
    H: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    SPLIT: tl.constexpr,
    V: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The gradients of a block's keys and values from up to ``part`` of the queries that chose it, in float32.

    ``takers[G, taken]`` are queries, ordered by the block that they chose; those of a block begin at ``starts``. ``H``
    is the heads of a key head.
    """
    at, group = tl.program_id(0), tl.program_id(1)
    block = tl.load(part_blocks + group * parts + at)
    if block < blocks:
        of_block = group * (blocks + 1) + block
        start = tl.load(starts + of_block) + (at - tl.load(parts_before + of_block)) * part
        stop = tl.minimum(start + part, tl.load(starts + of_block + 1))
        column_N = tl.arange(0, N)
        key_N = tl.load(block_begins + block) + column_N
        is_key_N = key_N < tl.load(block_stops + block)
        row_N = key_N.to(tl.int64) * groups + group
        key_ND, key_NE = _load_wide(key, row_N, is_key_N, width, D, E, SPLIT)
        value_NV = _load(value, row_N, is_key_N, value_width, V)
        dkey_ND = tl.zeros([N, D], dtype=tl.float32)
        dkey_NE = tl.zeros([N, E], dtype=tl.float32)
        dvalue_NV = tl.zeros([N, V], dtype=tl.float32)
        member_M, head_M = tl.arange(0, M) // H, tl.arange(0, M) % H
        takers += group.to(tl.int64) * taken
        for place in range(start, stop, M // H):
            is_query_M = (member_M < M // H) & (place + member_M < stop)
            token_M = tl.load(takers + place + member_M, mask=is_query_M, other=0)
            row_M = token_M.to(tl.int64) * heads + group * H + head_M
            query_MD, query_ME = _load_wide(query, row_M, is_query_M, width, D, E, SPLIT)
            upstream_MV = _load(doutput, row_M, is_query_M, value_width, V)
            gate_M, norm_M, mean_M = _upstream(gates, norms, means, row_M, is_query_M)
            seen_NM = is_key_N[:, None] & is_query_M[None, :] & (key_N[:, None] <= token_M[None, :])
            logit_NM = _products(key_ND, key_NE, query_MD, query_ME, SPLIT, PRECISION) * by_two
            dlogit_NM, dvalue_NV = _weights_of_keys(
                logit_NM, value_NV, upstream_MV, gate_M, norm_M, mean_M, seen_NM, scaling, dvalue_NV, PRECISION
            )
            dkey_ND, dkey_NE = _add_rows(
                dkey_ND, dkey_NE, dlogit_NM.to(query_MD.dtype), query_MD, query_ME, SPLIT, PRECISION
            )
        partial += (at * groups + group.to(tl.int64)) * block_size * (width + value_width)
        _store_wide(partial, dkey_ND, dkey_NE, column_N, column_N < block_size, width, D, E, SPLIT)
        _store(partial + block_size * width, dvalue_NV, column_N, column_N < block_size, value_width, V)


@triton.jit
def add_parts_kernel(
    partial,
    parts_before,
    block_begins,
    block_stops,
    dkey,
    dvalue,
    blocks,
    groups,
    width,
    value_width,
    block_size,
    N: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    SPLIT: tl.constexpr,
    V: tl.constexpr,
):
    """A block's gradients, of all its parts in order."""
    block, group = tl.program_id(0), tl.program_id(1)
    column_N = tl.arange(0, N)
    key_N = tl.load(block_begins + block) + column_N
    is_key_N = key_N < tl.load(block_stops + block)
    dkey_ND = tl.zeros([N, D], dtype=tl.float32)
    dkey_NE = tl.zeros([N, E], dtype=tl.float32)
    dvalue_NV = tl.zeros([N, V], dtype=tl.float32)
    of_block = parts_before + group * (blocks + 1) + block
    for at in range(tl.load(of_block), tl.load(of_block + 1)):
        here = partial + (at * groups + group.to(tl.int64)) * block_size * (width + value_width)
        part_ND, part_NE = _load_wide(here, column_N, is_key_N, width, D, E, SPLIT)
        dkey_ND += part_ND
        if SPLIT:
            dkey_NE += part_NE
        dvalue_NV += _load(here + block_size * width, column_N, is_key_N, value_width, V)
    row_N = key_N.to(tl.int64) * groups + group
    _store_wide(dkey, dkey_ND, dkey_NE, row_N, is_key_N, width, D, E, SPLIT)
    _store(dvalue, dvalue_NV, row_N, is_key_N, value_width, V)


@triton.jit
def mix_kernel(branches, gates, output, rows, width, R: tl.constexpr, V: tl.constexpr):
    """The sum of three branches ``[3, rows, V]``, each times its gate."""
    row_R = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    is_row_R = row_R < rows
    mixed_RV = tl.zeros([R, V], dtype=tl.float32)
    for branch in range(3):
        gate_R = tl.load(gates + row_R * 3 + branch, mask=is_row_R, other=0.0).to(tl.float32)
        of_branch_RV = _load(branches, branch * rows + row_R, is_row_R, width, V)
        mixed_RV += gate_R[:, None] * of_branch_RV.to(tl.float32)
    _store(output, mixed_RV, row_R, is_row_R, width, V)


@triton.jit
def unmix_kernel(doutput, branches, gates, dgates, means, rows, width, R: tl.constexpr, V: tl.constexpr):
    """The gradients of gates, and times the gates the means of the gradients of each branch's weights."""
    row_R = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    is_row_R = row_R < rows
    upstream_RV = _load(doutput, row_R, is_row_R, width, V).to(tl.float32)
    for branch in range(3):
        gate_R = tl.load(gates + row_R * 3 + branch, mask=is_row_R, other=0.0).to(tl.float32)
        at_R = branch * rows + row_R
        dgate_R = tl.sum(upstream_RV * _load(branches, at_R, is_row_R, width, V).to(tl.float32), 1)
        tl.store(dgates + row_R * 3 + branch, dgate_R.to(dgates.dtype.element_ty), mask=is_row_R)
        tl.store(means + at_R, dgate_R * gate_R, mask=is_row_R)
