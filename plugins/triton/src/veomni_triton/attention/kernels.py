"""Device code of attention whose bits don't depend on the batch: forward, and the gradients of queries and of keys.

A row is a query of one head. A tile has neighbouring rows of all heads of one key head, the heads of a query one after
the other. What a row sees are the keys from its begin to its stop, less what its mask hides there. Forward takes them
in blocks of ``N`` that are counted from the row's begin; rows of a tile that begin elsewhere take their turn. So all
blocks of a row are the same wherever it is, and what other rows of its tile see adds zeros to it. Backward counts none.

Reading a mask takes more registers than there are. Tiles that read none are a launch's, and all others another's.

Shape legend: that of ``attention_tiles``. ``X`` and ``Y`` are ``M`` and ``N``, or the other way for keys' gradients.
"""

from __future__ import annotations

import triton
import triton.language as tl

from veomni_triton.activations import tanh
from veomni_triton.attention_tiles import add_rows, attend, finish, load, load_wide, products, store, store_wide

# What is in a row's kind.
READ = tl.constexpr(1)  # its mask hides keys between begin and stop, or adds numbers: the scores take it
LOWEST = tl.constexpr(2)  # an added mask has the lowest number for all of its keys, which so are seen alike
_NONE = tl.constexpr(0x7FFFFFFF)  # where no key is
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def ranges_kernel(
    mask,  # [Bm, Hm, S, L]; booleans as bytes
    ranges,  # [3, Bm, Hm, S] int32, written: begins, stops, kinds
    half,  # half of the lowest number of mask's dtype
    heads,  # Hm
    queries,  # S
    keys,  # L
    mask_batch,
    mask_head,
    mask_row,
    mask_key,
    BOOLEAN: tl.constexpr,
    N: tl.constexpr,
):
    """What each row of a mask sees; a program has one."""
    query, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = mask + batch.to(tl.int64) * mask_batch + head.to(tl.int64) * mask_head + query.to(tl.int64) * mask_row
    begin, low_begin = tl.full([], _NONE, tl.int32), tl.full([], _NONE, tl.int32)
    stop, seen, added = tl.zeros([], tl.int32), tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    low_stop, low = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    for start in range(0, keys, N):
        key_N = start + tl.arange(0, N)
        is_key_N = key_N < keys
        value_N = tl.load(row + key_N.to(tl.int64) * mask_key, mask=is_key_N, other=0)
        if BOOLEAN:
            seen_N = is_key_N & (value_N != 0)
        else:
            value_N = value_N.to(tl.float32)
            seen_N = is_key_N & (value_N > half)
            low_N = is_key_N & (value_N > float("-inf"))
            low_begin = tl.minimum(low_begin, tl.min(tl.where(low_N, key_N, _NONE), 0))
            low_stop = tl.maximum(low_stop, tl.max(tl.where(low_N, key_N + 1, 0), 0))
            low += tl.sum(low_N.to(tl.int32), 0)
            added += tl.sum((seen_N & (value_N != 0.0)).to(tl.int32), 0)
        begin = tl.minimum(begin, tl.min(tl.where(seen_N, key_N, _NONE), 0))
        stop = tl.maximum(stop, tl.max(tl.where(seen_N, key_N + 1, 0), 0))
        seen += tl.sum(seen_N.to(tl.int32), 0)
    kind = tl.where((seen < stop - begin) | (added > 0), READ, 0)
    if not BOOLEAN:
        is_lowest = (seen == 0) & (low > 0)
        begin, stop = tl.where(is_lowest, low_begin, begin), tl.where(is_lowest, low_stop, stop)
        kind = tl.where(is_lowest, tl.where(low < stop - begin, LOWEST + READ, LOWEST), kind)
    place = ranges + (batch * heads + head).to(tl.int64) * queries + query
    part = tl.num_programs(2).to(tl.int64) * heads * queries
    tl.store(place, tl.where(stop > 0, begin, 0))
    tl.store(place + part, stop)
    tl.store(place + 2 * part, tl.where(stop > 0, kind, 0))


@triton.jit
def _rows(
    ranges,
    row_M,
    rows,
    group,
    per_group,
    batch,
    range_batch,
    range_head,
    range_part,
    MASKED: tl.constexpr,
    HALVED: tl.constexpr,
):
    """Of a tile's rows: query, head, whether there is one, begin (:data:`_NONE` if nothing is seen), stop, kind.

    If ``HALVED``, the tile is ``MASKED``'s or another launch's, which then has the rows.
    """
    is_row_M = row_M < rows
    query_M = row_M // per_group
    head_M = group * per_group + row_M % per_group
    place_M = ranges + batch * range_batch + head_M.to(tl.int64) * range_head + query_M
    begin_M = tl.load(place_M, mask=is_row_M, other=0)
    stop_M = tl.load(place_M + range_part, mask=is_row_M, other=0)
    kind_M = tl.load(place_M + 2 * range_part, mask=is_row_M, other=0)
    if HALVED:
        is_row_M = is_row_M & ((tl.max(kind_M, 0) > 0) == MASKED)
        stop_M = tl.where(is_row_M, stop_M, 0)
    return query_M, head_M, is_row_M, tl.where(begin_M < stop_M, begin_M, _NONE), stop_M, kind_M


@triton.jit
def _mask_rows(query_M, head_M, mask_head, mask_row, LARGE: tl.constexpr):
    """Where the rows of a sequence's mask begin. Of int32 unless it is ``LARGE``: pointers fill the registers."""
    if LARGE:
        query_M, head_M = query_M.to(tl.int64), head_M.to(tl.int64)
    return head_M * mask_head + query_M * mask_row


@triton.jit
def _mask_keys(key_N, mask_key, LARGE: tl.constexpr):
    """Where the keys of a mask's row are."""
    if LARGE:
        key_N = key_N.to(tl.int64)
    return key_N * mask_key


@triton.jit
def _scores(
    product_XY,
    seen_XY,
    kind_XY,
    place_XY,
    mask,
    half,
    scaling,
    softcap,
    CAPPED: tl.constexpr,
    MASKED: tl.constexpr,
    BOOLEAN: tl.constexpr,
    LOSES: tl.constexpr,
):
    """The scores to base 2, what of ``seen`` the mask leaves, and the derivative of scores by ``product * scaling``."""
    score_XY = product_XY * scaling
    slope_XY = tl.full(score_XY.shape, 1.0, tl.float32)
    if CAPPED:
        bounded_XY = tanh(score_XY)
        score_XY = bounded_XY * softcap
        slope_XY = 1.0 - bounded_XY * bounded_XY
    if MASKED:
        read_XY = seen_XY & ((kind_XY & READ) > 0)
        value_XY = tl.load(mask + place_XY, mask=read_XY, other=1 if BOOLEAN else 0.0)
        if BOOLEAN:
            seen_XY = seen_XY & (value_XY != 0)
        else:
            value_XY = value_XY.to(tl.float32)
            is_lowest_XY = (kind_XY & LOWEST) > 0
            seen_XY = seen_XY & (value_XY > tl.where(is_lowest_XY, float("-inf"), half))
            if LOSES:  # beside numbers so low, scores are lost
                score_XY = tl.where(is_lowest_XY, 0.0, score_XY)
            score_XY += tl.where(is_lowest_XY, 0.0, value_XY * _LOG2_E)
    return score_XY, seen_XY, slope_XY


@triton.jit(do_not_specialize=["queries"])
def forward_kernel(
    query,  # [B, H, S, D]
    key,  # [B, K, L, D]
    value,  # [B, K, L, V]
    mask,  # [B, H, S, L] with strides of 0 where it is expanded, or None
    ranges,  # [3, Bm, Hm, S]
    sinks,  # [H] or None
    output,  # [B, S, H, V], written
    norms,  # [B, S, H] float32, written: logarithms of sums to base 2
    half,
    scaling,
    softcap,
    queries,  # S
    heads,  # H
    groups,  # K
    width,
    value_width,
    query_batch,
    query_head,
    query_row,
    key_batch,
    key_head,
    key_row,
    value_batch,
    value_head,
    value_row,
    mask_batch,
    mask_head,
    mask_row,
    mask_key,
    range_batch,
    range_head,
    range_part,
    CAPPED: tl.constexpr,
    MASKED: tl.constexpr,
    HALVED: tl.constexpr,
    BOOLEAN: tl.constexpr,
    LOSES: tl.constexpr,
    LARGE: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    SPLIT: tl.constexpr,
    V: tl.constexpr,
    PRECISION: tl.constexpr,
):
    group, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    per_group = heads // groups
    query_M, head_M, is_row_M, begin_M, stop_M, kind_M = _rows(
        ranges,
        tl.program_id(0) * M + tl.arange(0, M),
        queries * per_group,
        group,
        per_group,
        batch,
        range_batch,
        range_head,
        range_part,
        MASKED,
        HALVED,
    )
    at_M = head_M.to(tl.int64) * query_head + query_M.to(tl.int64) * query_row
    query_MD, query_ME = load_wide(query + batch * query_batch, at_M, is_row_M, width, D, E, SPLIT, 1)
    mask_M = _mask_rows(query_M, head_M, mask_head, mask_row, LARGE)
    if MASKED:
        mask += batch * mask_batch
    key += batch * key_batch + group.to(tl.int64) * key_head
    value += batch * value_batch + group.to(tl.int64) * value_head
    highest_M = tl.full([M], float("-inf"), dtype=tl.float32)
    sum_M = tl.zeros([M], dtype=tl.float32)
    if sinks is not None:  # as if it had been seen before the first key
        highest_M = tl.load(sinks + head_M, mask=is_row_M, other=0.0).to(tl.float32) * _LOG2_E
        sum_M += 1.0
    output_MV = tl.zeros([M, V], dtype=tl.float32)
    begin = tl.min(begin_M, 0)
    while begin < _NONE:
        own_M = begin_M == begin
        last = tl.max(tl.where(own_M, stop_M, 0), 0)
        for start in range(begin, last, N):
            key_N = start + tl.arange(0, N)
            key_ND, key_NE = load_wide(key, key_N, key_N < last, width, D, E, SPLIT, key_row)
            value_NV = load(value, key_N, key_N < last, value_width, V, 0, value_row)
            score_MN, seen_MN, _ = _scores(
                products(query_MD, query_ME, key_ND, key_NE, SPLIT, PRECISION),
                own_M[:, None] & (key_N[None, :] < stop_M[:, None]),
                kind_M[:, None],
                mask_M[:, None] + _mask_keys(key_N, mask_key, LARGE)[None, :],
                mask,
                half,
                scaling,
                softcap,
                CAPPED,
                MASKED,
                BOOLEAN,
                LOSES,
            )
            highest_M, sum_M, output_MV = attend(score_MN, value_NV, seen_MN, highest_M, sum_M, output_MV, PRECISION)
        begin = tl.min(tl.where(begin_M > begin, begin_M, _NONE), 0)
    row_M = (batch * queries + query_M) * heads + head_M
    finish(output, norms, highest_M, sum_M, output_MV, row_M, is_row_M, value_width, V)


@triton.jit(do_not_specialize=["queries"])
def dquery_kernel(
    query,
    key,
    value,
    mask,
    ranges,
    output,
    doutput,  # [B, S, H, V], as output
    norms,
    means,  # [B, S, H] float32, written: of the gradients of a row's weights
    dquery,  # [B, S, H, D], written
    half,
    scaling,
    softcap,
    factor,  # the derivative of an uncapped score by the product
    queries,
    heads,
    groups,
    width,
    value_width,
    query_batch,
    query_head,
    query_row,
    key_batch,
    key_head,
    key_row,
    value_batch,
    value_head,
    value_row,
    mask_batch,
    mask_head,
    mask_row,
    mask_key,
    range_batch,
    range_head,
    range_part,
    CAPPED: tl.constexpr,
    MASKED: tl.constexpr,
    HALVED: tl.constexpr,
    BOOLEAN: tl.constexpr,
    LOSES: tl.constexpr,
    LARGE: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    SPLIT: tl.constexpr,
    V: tl.constexpr,
    PRECISION: tl.constexpr,
):
    group, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    per_group = heads // groups
    query_M, head_M, is_row_M, begin_M, stop_M, kind_M = _rows(
        ranges,
        tl.program_id(0) * M + tl.arange(0, M),
        queries * per_group,
        group,
        per_group,
        batch,
        range_batch,
        range_head,
        range_part,
        MASKED,
        HALVED,
    )
    at_M = head_M.to(tl.int64) * query_head + query_M.to(tl.int64) * query_row
    query_MD, query_ME = load_wide(query + batch * query_batch, at_M, is_row_M, width, D, E, SPLIT, 1)
    mask_M = _mask_rows(query_M, head_M, mask_head, mask_row, LARGE)
    if MASKED:
        mask += batch * mask_batch
    key += batch * key_batch + group.to(tl.int64) * key_head
    value += batch * value_batch + group.to(tl.int64) * value_head
    row_M = (batch * queries + query_M) * heads + head_M
    upstream_MV = load(doutput, row_M, is_row_M, value_width, V)
    output_MV = load(output, row_M, is_row_M, value_width, V)
    mean_M = tl.sum(upstream_MV.to(tl.float32) * output_MV.to(tl.float32), 1)
    tl.store(means + row_M, mean_M, mask=is_row_M)
    norm_M = tl.load(norms + row_M, mask=is_row_M, other=float("inf"))
    dquery_MD = tl.zeros([M, D], dtype=tl.float32)
    dquery_ME = tl.zeros([M, E], dtype=tl.float32)
    last = tl.max(stop_M, 0)
    for start in range(tl.min(begin_M, 0), last, N):
        key_N = start + tl.arange(0, N)
        key_ND, key_NE = load_wide(key, key_N, key_N < last, width, D, E, SPLIT, key_row)
        value_NV = load(value, key_N, key_N < last, value_width, V, 0, value_row)
        score_MN, seen_MN, slope_MN = _scores(
            products(query_MD, query_ME, key_ND, key_NE, SPLIT, PRECISION),
            (key_N[None, :] >= begin_M[:, None]) & (key_N[None, :] < stop_M[:, None]),
            kind_M[:, None],
            mask_M[:, None] + _mask_keys(key_N, mask_key, LARGE)[None, :],
            mask,
            half,
            scaling,
            softcap,
            CAPPED,
            MASKED,
            BOOLEAN,
            LOSES,
        )
        weight_MN = tl.exp2(score_MN - norm_M[:, None])
        dweight_MN = tl.dot(upstream_MV, tl.trans(value_NV), input_precision=PRECISION)
        dproduct_MN = tl.where(seen_MN, weight_MN * (dweight_MN - mean_M[:, None]) * slope_MN * factor, 0.0)
        dquery_MD, dquery_ME = add_rows(
            dquery_MD, dquery_ME, dproduct_MN.to(key_ND.dtype), key_ND, key_NE, SPLIT, PRECISION
        )
    store_wide(dquery, dquery_MD, dquery_ME, row_M, is_row_M, width, D, E, SPLIT)


@triton.jit(do_not_specialize=["queries", "keys"])
def dkeys_kernel(
    query,
    key,
    value,
    mask,
    ranges,
    seeing,  # [2, Bm, tiles of keys] int32: the queries from and to which see some of a tile's keys
    doutput,
    norms,
    means,
    dkey,  # [B, L, K, D], written
    dvalue,  # [B, L, K, V], written
    half,
    scaling,
    softcap,
    factor,
    queries,
    keys,  # L
    heads,
    groups,
    width,
    value_width,
    query_batch,
    query_head,
    query_row,
    key_batch,
    key_head,
    key_row,
    value_batch,
    value_head,
    value_row,
    mask_batch,
    mask_head,
    mask_row,
    mask_key,
    range_batch,
    range_head,
    range_part,
    seeing_batch,
    seeing_part,
    CAPPED: tl.constexpr,
    MASKED: tl.constexpr,
    BOOLEAN: tl.constexpr,
    LOSES: tl.constexpr,
    LARGE: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    SPLIT: tl.constexpr,
    V: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The gradients of a tile of keys of one head, summed over the rows of all its queries and their heads."""
    group, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    per_group = heads // groups
    key_N = tl.program_id(0) * N + tl.arange(0, N)
    is_key_N = key_N < keys
    if MASKED:
        mask += batch * mask_batch
    key += batch * key_batch + group.to(tl.int64) * key_head
    value += batch * value_batch + group.to(tl.int64) * value_head
    key_ND, key_NE = load_wide(key, key_N, is_key_N, width, D, E, SPLIT, key_row)
    value_NV = load(value, key_N, is_key_N, value_width, V, 0, value_row)
    dkey_ND = tl.zeros([N, D], dtype=tl.float32)
    dkey_NE = tl.zeros([N, E], dtype=tl.float32)
    dvalue_NV = tl.zeros([N, V], dtype=tl.float32)
    seeing += batch * seeing_batch + tl.program_id(0)
    first, last = tl.load(seeing) * per_group, tl.load(seeing + seeing_part) * per_group
    for start in range(first, last, M):
        query_M, head_M, is_row_M, begin_M, stop_M, kind_M = _rows(
            ranges,
            start + tl.arange(0, M),
            last,
            group,
            per_group,
            batch,
            range_batch,
            range_head,
            range_part,
            MASKED,
            False,
        )
        at_M = head_M.to(tl.int64) * query_head + query_M.to(tl.int64) * query_row
        query_MD, query_ME = load_wide(query + batch * query_batch, at_M, is_row_M, width, D, E, SPLIT, 1)
        mask_M = _mask_rows(query_M, head_M, mask_head, mask_row, LARGE)
        row_M = (batch * queries + query_M) * heads + head_M
        upstream_MV = load(doutput, row_M, is_row_M, value_width, V)
        norm_M = tl.load(norms + row_M, mask=is_row_M, other=float("inf"))
        mean_M = tl.load(means + row_M, mask=is_row_M, other=0.0)
        score_NM, seen_NM, slope_NM = _scores(
            products(key_ND, key_NE, query_MD, query_ME, SPLIT, PRECISION),
            is_key_N[:, None] & (key_N[:, None] >= begin_M[None, :]) & (key_N[:, None] < stop_M[None, :]),
            kind_M[None, :],
            mask_M[None, :] + _mask_keys(key_N, mask_key, LARGE)[:, None],
            mask,
            half,
            scaling,
            softcap,
            CAPPED,
            MASKED,
            BOOLEAN,
            LOSES,
        )
        weight_NM = tl.where(seen_NM, tl.exp2(score_NM - norm_M[None, :]), 0.0)
        dvalue_NV = tl.dot(weight_NM.to(upstream_MV.dtype), upstream_MV, dvalue_NV, input_precision=PRECISION)
        dweight_NM = tl.dot(value_NV, tl.trans(upstream_MV), input_precision=PRECISION)
        dproduct_NM = tl.where(seen_NM, weight_NM * (dweight_NM - mean_M[None, :]) * slope_NM * factor, 0.0)
        dkey_ND, dkey_NE = add_rows(
            dkey_ND, dkey_NE, dproduct_NM.to(query_MD.dtype), query_MD, query_ME, SPLIT, PRECISION
        )
    row_N = (batch * keys + key_N) * groups + group
    store_wide(dkey, dkey_ND, dkey_NE, row_N, is_key_N, width, D, E, SPLIT)
    store(dvalue, dvalue_NV, row_N, is_key_N, value_width, V)
