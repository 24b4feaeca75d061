"""Device code of attention's forward, whose bits don't depend on the batch.

A row takes its keys in blocks of ``N`` that are counted from its begin; rows of a tile that begin elsewhere take their
turn. So all blocks of a row are the same wherever it is, and what other rows of its tile see adds zeros to it.

Shape legend: that of ``attention_tiles``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from veomni_triton.attention.rows import LOG2_E, NONE, mask_keys, mask_rows, scores, tile_rows
from veomni_triton.attention_tiles import PARTS, attend, finish, load, load_wide, products


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
    query_M, head_M, is_row_M, begin_M, stop_M, kind_M = tile_rows(
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
    highest_M = tl.full([M], float("-inf"), dtype=tl.float32)
    sum_MP = tl.zeros([M, PARTS], dtype=tl.float32)
    if sinks is not None:  # as if it had been seen before the first key
        highest_M = tl.load(sinks + head_M, mask=is_row_M, other=0.0).to(tl.float32) * LOG2_E
        sum_MP += tl.where(tl.arange(0, PARTS)[None, :] == 0, 1.0, 0.0)
    output_MV = tl.zeros([M, V], dtype=tl.float32)
    begin = tl.min(begin_M, 0)
    while begin < NONE:
        own_M = begin_M == begin
        last = tl.max(tl.where(own_M, stop_M, 0), 0)
        for start in range(begin, last, N):
            key_N = start + tl.arange(0, N)
            key_ND, key_NE = load_wide(key, key_N, key_N < last, width, D, E, SPLIT, key_row)
            value_NV = load(value, key_N, key_N < last, value_width, V, 0, value_row)
            score_MN, seen_MN, _ = scores(
                products(query_MD, query_ME, key_ND, key_NE, SPLIT, PRECISION),
                own_M[:, None] & (key_N[None, :] < stop_M[:, None]),
                kind_M[:, None],
                mask_M[:, None] + mask_keys(key_N, mask_key, LARGE)[None, :],
                mask,
                half,
                scaling,
                softcap,
                CAPPED,
                MASKED,
                BOOLEAN,
                LOSES,
            )
            highest_M, sum_MP, output_MV = attend(score_MN, value_NV, seen_MN, highest_M, sum_MP, output_MV, PRECISION)
        begin = tl.min(tl.where(begin_M > begin, begin_M, NONE), 0)
    row_M = (batch * queries + query_M) * heads + head_M
    finish(output, norms, highest_M, sum_MP, output_MV, row_M, is_row_M, value_width, V)
