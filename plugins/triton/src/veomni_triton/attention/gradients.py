"""Device code of attention's gradients: one kernel has those of queries, another those of keys and values.

Nothing is added by atomics. Blocks of keys are not counted from a row's begin, as forward's are.

Shape legend: that of ``attention_tiles``.
"""

from __future__ import annotations

import triton.language as tl

from veomni_ops.triton_launches import triton_kernel
from veomni_triton.attention.rows import NONE, NOT_SPECIALIZED, mask_keys, mask_rows, row_range, scores, tile_rows
from veomni_triton.attention_tiles import add_rows, load, load_wide, products, store, store_wide


@triton_kernel(do_not_specialize=NOT_SPECIALIZED)
def dquery_kernel(
    query,  # [B, H, S, D]
    key,  # [B, K, L, D]
    value,  # [B, K, L, V]
    mask,  # [B, H, S, L] with strides of 0 where it is expanded, or None
    ranges,  # [4, Bm, Hm, S]
    output,  # [B, S, H, V]
    doutput,  # [B, S, H, V], as output
    norms,  # [B, S, H] float32, as forward writes them
    means,  # [B, S, H] float32, written: of the gradients of a row's weights
    dquery,  # [B, S, H, D], written
    scaling,
    softcap,
    factor,  # the derivative of an uncapped score by the product
    queries,
    heads,
    groups,
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
    width: tl.constexpr,
    value_width: tl.constexpr,
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
    query_M, head_M, is_row_M, begin_M, stop_M, kind_M, largest_M = tile_rows(
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
    mask_M = mask_rows(query_M, head_M, mask_head, mask_row, LARGE)
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
    # Of a tile that sees nothing from 0 on: the loop's pipeline reads ahead, and NONE and a step more is below 0.
    first = tl.minimum(tl.min(begin_M, 0), last)
    # Between these all rows of the tile see all keys, which so need no comparison.
    whole = first + tl.cdiv(tl.minimum(tl.max(tl.where(is_row_M, begin_M, 0), 0), last) - first, N) * N
    all_see = tl.min(tl.where(is_row_M, stop_M, NONE), 0)
    wide = 0 if MASKED else tl.maximum(tl.minimum(all_see, last) - whole, 0) // N * N
    for checked in tl.static_range(1 if MASKED else 0, 2):
        for at in range(first if checked else whole, last - wide if checked else whole + wide, N):
            start = tl.where(at < whole, at, at + wide) if checked else at
            key_N = start + tl.arange(0, N)
            is_key_N = key_N < last if checked else key_N < NONE
            key_ND, key_NE = load_wide(key, key_N, is_key_N, width, D, E, SPLIT, key_row)
            value_NV = load(value, key_N, is_key_N, value_width, V, 0, value_row)
            score_MN, scale, shift_MN, seen_MN, slope_MN = scores(
                products(query_MD, query_ME, key_ND, key_NE, SPLIT, PRECISION),
                (key_N[None, :] >= begin_M[:, None]) & (key_N[None, :] < stop_M[:, None]),
                kind_M[:, None],
                largest_M[:, None],
                mask_M[:, None] + mask_keys(key_N, mask_key, LARGE)[None, :],
                mask,
                scaling,
                softcap,
                CAPPED,
                MASKED,
                BOOLEAN,
                LOSES,
            )
            weight_MN = tl.exp2(tl.fma(score_MN, scale, shift_MN - norm_M[:, None]))
            dweight_MN = tl.dot(upstream_MV, tl.trans(value_NV), input_precision=PRECISION)
            dscore_MN = weight_MN * (dweight_MN - mean_M[:, None]) * slope_MN
            if checked:
                dscore_MN = tl.where(seen_MN, dscore_MN, 0.0)
            dquery_MD, dquery_ME = add_rows(
                dquery_MD, dquery_ME, dscore_MN.to(key_ND.dtype), key_ND, key_NE, SPLIT, PRECISION
            )
    dquery_MD, dquery_ME = dquery_MD * factor, dquery_ME * factor
    store_wide(dquery, dquery_MD, dquery_ME, row_M, is_row_M, width, D, E, SPLIT)


@triton_kernel(do_not_specialize=NOT_SPECIALIZED)
def dkeys_kernel(
    query,
    key,
    value,
    mask,
    ranges,
    seeing,  # [5, Bm, tiles of keys] int32, as `seeing_kernel` writes it
    doutput,
    norms,
    means,
    dkey,  # [B, L, K, D], written
    dvalue,  # [B, L, K, V], written
    scaling,
    softcap,
    factor,
    queries,
    keys,  # L
    heads,
    groups,
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
    width: tl.constexpr,
    value_width: tl.constexpr,
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
    """The gradients of a tile of keys of one head, summed over its queries' heads, and over the queries of each."""
    group, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    per_group = heads // groups
    key_N = tl.program_id(0) * N + tl.arange(0, N)
    is_key_N = key_N < keys
    seeing += batch * seeing_batch + tl.program_id(0)
    first, last = tl.load(seeing), tl.load(seeing + seeing_part)
    whole, wide = tl.load(seeing + 2 * seeing_part), tl.load(seeing + 3 * seeing_part)
    if HALVED:  # as `tile_rows` has it: the tile is this launch's or the other's
        is_own = (tl.load(seeing + 4 * seeing_part) > 0) == MASKED
        last, is_key_N = tl.where(is_own, last, 0), is_key_N & is_own
    if MASKED or HALVED:
        wide = tl.where(last > 0, 0 if MASKED else wide, 0)
    if MASKED:
        mask += batch * mask_batch
    key += batch * key_batch + group.to(tl.int64) * key_head
    value += batch * value_batch + group.to(tl.int64) * value_head
    key_ND, key_NE = load_wide(key, key_N, is_key_N, width, D, E, SPLIT, key_row)
    value_NV = load(value, key_N, is_key_N, value_width, V, 0, value_row)
    dkey_ND = tl.zeros([N, D], dtype=tl.float32)
    dkey_NE = tl.zeros([N, E], dtype=tl.float32)
    dvalue_NV = tl.zeros([N, V], dtype=tl.float32)
    for place in range(0, per_group):
        head = group * per_group + place
        query_of_head = query + batch * query_batch + head.to(tl.int64) * query_head
        ranges_of_head = ranges + batch * range_batch + head.to(tl.int64) * range_head
        for checked in tl.static_range(1 if MASKED else 0, 2):
            for at in range(first if checked else whole, last - wide if checked else whole + wide, M):
                start = tl.where(at < whole, at, at + wide) if checked else at
                query_M = start + tl.arange(0, M)
                is_row_M = query_M < last if checked else query_M < NONE
                query_MD, query_ME = load_wide(query_of_head, query_M, is_row_M, width, D, E, SPLIT, query_row)
                row_M = (batch * queries + query_M) * heads + head
                upstream_MV = load(doutput, row_M, is_row_M, value_width, V)
                norm_M = tl.load(norms + row_M, mask=is_row_M, other=float("inf"))
                mean_M = tl.load(means + row_M, mask=is_row_M, other=0.0)
                begin_M, stop_M, kind_M, largest_M = row_range(ranges_of_head + query_M, is_row_M, range_part)
                score_MN, scale, shift_MN, seen_MN, slope_MN = scores(
                    products(query_MD, query_ME, key_ND, key_NE, SPLIT, PRECISION),
                    (key_N[None, :] >= begin_M[:, None]) & (key_N[None, :] < stop_M[:, None]),
                    kind_M[:, None],
                    largest_M[:, None],
                    mask_rows(query_M, head, mask_head, mask_row, LARGE)[:, None]
                    + mask_keys(key_N, mask_key, LARGE)[None, :],
                    mask,
                    scaling,
                    softcap,
                    CAPPED,
                    MASKED,
                    BOOLEAN,
                    LOSES,
                )
                weight_MN = tl.exp2(tl.fma(score_MN, scale, shift_MN - norm_M[:, None]))
                if checked:
                    weight_MN = tl.where(seen_MN, weight_MN, 0.0)
                dweight_MN = tl.dot(upstream_MV, tl.trans(value_NV), input_precision=PRECISION)
                weight_NM = tl.trans(weight_MN.to(upstream_MV.dtype))
                dvalue_NV = tl.dot(weight_NM, upstream_MV, dvalue_NV, input_precision=PRECISION)
                dscore_MN = weight_MN * (dweight_MN - mean_M[:, None]) * slope_MN
                if checked:
                    dscore_MN = tl.where(seen_MN, dscore_MN, 0.0)
                dscore_NM = tl.trans(dscore_MN.to(query_MD.dtype))
                dkey_ND, dkey_NE = add_rows(dkey_ND, dkey_NE, dscore_NM, query_MD, query_ME, SPLIT, PRECISION)
    dkey_ND, dkey_NE = dkey_ND * factor, dkey_NE * factor
    row_N = (batch * keys + key_N) * groups + group
    store_wide(dkey, dkey_ND, dkey_NE, row_N, is_key_N, width, D, E, SPLIT)
    store(dvalue, dvalue_NV, row_N, is_key_N, value_width, V)
