"""Device code of attention's forward, whose bits don't depend on the batch.

A row takes its keys in blocks of ``N`` that are counted from its begin; rows of a tile that begin elsewhere take their
turn. So all blocks of a row are the same wherever it is, and what other rows of its tile see adds zeros to it.

Shape legend: that of ``attention_tiles``.
"""

from __future__ import annotations

import triton.language as tl

from veomni_ops.triton_launches import triton_kernel
from veomni_triton.attention.rows import LOG2_E, NONE, NOT_SPECIALIZED, mask_keys, mask_rows, scores, tile_rows
from veomni_triton.attention_tiles import SUMS, attend, finish, load, load_wide, products


@triton_kernel(do_not_specialize=NOT_SPECIALIZED)
def forward_kernel(
    query,  # [B, H, S, D]
    key,  # [B, K, L, D]
    value,  # [B, K, L, V]
    mask,  # [B, H, S, L] with strides of 0 where it is expanded, or None
    ranges,  # [4, Bm, Hm, S]
    sinks,  # [H] or None
    output,  # [B, S, H, V], written
    norms,  # [B, S, H] float32, written: logarithms to base 2 of sums, beside the largest number of a row's mask
    scaling,
    softcap,
    queries,  # S
    heads,  # H
    groups,  # K
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
    RISING: tl.constexpr,
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
    SHIFTED: tl.constexpr = MASKED or not RISING
    highest_M = tl.full([M], float("-inf"), dtype=tl.float32)
    sum_MS = tl.zeros([M, SUMS], dtype=tl.float32)
    if sinks is not None:  # as if it had been seen before the first key
        highest_M = tl.load(sinks + head_M, mask=is_row_M, other=0.0).to(tl.float32) * LOG2_E
        sum_MS += 1.0
    output_MV = tl.zeros([M, V], dtype=tl.float32)
    begin = tl.min(begin_M, 0)
    while begin < NONE:
        own_M = begin_M == begin
        last = tl.max(tl.where(own_M, stop_M, 0), 0)
        # Up to here all rows of the tile see all keys, which so need no comparison.
        all_see = tl.min(tl.where(own_M, stop_M, tl.where(is_row_M, 0, NONE)), 0)
        whole = begin if SHIFTED else begin + tl.maximum(all_see - begin, 0) // N * N
        for checked in tl.static_range(1 if SHIFTED else 0, 2):
            for start in range(whole if checked else begin, last if checked else whole, N):
                key_N = start + tl.arange(0, N)
                is_key_N = key_N < last if checked else key_N < NONE
                key_ND, key_NE = load_wide(key, key_N, is_key_N, width, D, E, SPLIT, key_row)
                value_NV = load(value, key_N, is_key_N, value_width, V, 0, value_row)
                seen_MN = own_M[:, None] & (key_N[None, :] < stop_M[:, None])
                score_MN, scale, shift_MN, seen_MN, _ = scores(
                    products(query_MD, query_ME, key_ND, key_NE, SPLIT, PRECISION),
                    seen_MN,
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
                if SHIFTED:
                    score_MN = tl.where(seen_MN, score_MN, 0.0)
                    shift_MN = tl.where(seen_MN, shift_MN, float("-inf"))
                elif checked:
                    score_MN = tl.where(seen_MN, score_MN, float("-inf"))
                highest_M, sum_MS, output_MV = attend(
                    score_MN, scale, shift_MN, value_NV, highest_M, sum_MS, output_MV, SHIFTED, PRECISION
                )
        begin = tl.min(tl.where(begin_M > begin, begin_M, NONE), 0)
    row_M = (batch * queries + query_M) * heads + head_M
    finish(output, norms, highest_M, sum_MS, output_MV, row_M, is_row_M, value_width, V)
