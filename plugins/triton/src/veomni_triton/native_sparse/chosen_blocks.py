"""The branch of native sparse attention over blocks that each query has chosen, and the choice.

The shape legend is that of ``attention_tiles``.
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

LARGEST = tl.constexpr(3.4028234663852886e38)  # of float32


@triton_kernel
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


@triton_kernel
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
    count,
    block_size,
    width: tl.constexpr,
    value_width: tl.constexpr,
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
    query_HD, query_HE = load_wide(query, row_H, is_head_H, width, D, E, SPLIT)
    highest_H = tl.full([H], float("-inf"), dtype=tl.float32)
    sum_HS = tl.zeros([H, SUMS], dtype=tl.float32)
    output_HV = tl.zeros([H, V], dtype=tl.float32)
    for place in range(count):
        key_N, is_key_N = _chosen_keys(chosen, begin, token, group, groups, count, place, block_size, N)
        row_N = key_N.to(tl.int64) * groups + group
        key_ND, key_NE = load_wide(key, row_N, is_key_N, width, D, E, SPLIT)
        value_NV = load(value, row_N, is_key_N, value_width, V)
        logit_HN = products(query_HD, query_HE, key_ND, key_NE, SPLIT, PRECISION) * scaling
        logit_HN = tl.where(is_key_N[None, :], logit_HN, float("-inf"))
        highest_H, sum_HS, output_HV = attend(
            logit_HN, 1.0, 0.0, value_NV, highest_H, sum_HS, output_HV, False, PRECISION
        )
    finish(output, norms, highest_H, sum_HS, output_HV, row_H, is_head_H, value_width, V)


@triton_kernel
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
    count,
    block_size,
    width: tl.constexpr,
    value_width: tl.constexpr,
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
    query_HD, query_HE = load_wide(query, row_H, is_head_H, width, D, E, SPLIT)
    upstream_HV = load(doutput, row_H, is_head_H, value_width, V)
    gate_H, norm_H, mean_H = upstream(gates, norms, means, row_H, is_head_H)
    dquery_HD = tl.zeros([H, D], dtype=tl.float32)
    dquery_HE = tl.zeros([H, E], dtype=tl.float32)
    for place in range(count):
        key_N, is_key_N = _chosen_keys(chosen, begin, token, group, groups, count, place, block_size, N)
        row_N = key_N.to(tl.int64) * groups + group
        key_ND, key_NE = load_wide(key, row_N, is_key_N, width, D, E, SPLIT)
        value_NV = load(value, row_N, is_key_N, value_width, V)
        logit_HN = products(query_HD, query_HE, key_ND, key_NE, SPLIT, PRECISION) * by_two
        dlogit_HN = dlogits(
            logit_HN, value_NV, upstream_HV, gate_H, norm_H, mean_H, is_key_N[None, :], scaling, PRECISION
        )
        dquery_HD, dquery_HE = add_rows(
            dquery_HD, dquery_HE, dlogit_HN.to(key_ND.dtype), key_ND, key_NE, SPLIT, PRECISION
        )
    store_wide(dquery, dquery_HD, dquery_HE, row_H, is_head_H, width, D, E, SPLIT)


@triton_kernel
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
    block_size,
    part,
    width: tl.constexpr,
    value_width: tl.constexpr,
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
        key_ND, key_NE = load_wide(key, row_N, is_key_N, width, D, E, SPLIT)
        value_NV = load(value, row_N, is_key_N, value_width, V)
        dkey_ND = tl.zeros([N, D], dtype=tl.float32)
        dkey_NE = tl.zeros([N, E], dtype=tl.float32)
        dvalue_NV = tl.zeros([N, V], dtype=tl.float32)
        member_M, head_M = tl.arange(0, M) // H, tl.arange(0, M) % H
        takers += group.to(tl.int64) * taken
        for place in range(start, stop, M // H):
            is_query_M = (member_M < M // H) & (place + member_M < stop)
            token_M = tl.load(takers + place + member_M, mask=is_query_M, other=0)
            row_M = token_M.to(tl.int64) * heads + group * H + head_M
            query_MD, query_ME = load_wide(query, row_M, is_query_M, width, D, E, SPLIT)
            upstream_MV = load(doutput, row_M, is_query_M, value_width, V)
            gate_M, norm_M, mean_M = upstream(gates, norms, means, row_M, is_query_M)
            seen_NM = is_key_N[:, None] & is_query_M[None, :] & (key_N[:, None] <= token_M[None, :])
            logit_NM = products(key_ND, key_NE, query_MD, query_ME, SPLIT, PRECISION) * by_two
            dlogit_NM, dvalue_NV = weights_of_keys(
                logit_NM, value_NV, upstream_MV, gate_M, norm_M, mean_M, seen_NM, scaling, dvalue_NV, PRECISION
            )
            dkey_ND, dkey_NE = add_rows(
                dkey_ND, dkey_NE, dlogit_NM.to(query_MD.dtype), query_MD, query_ME, SPLIT, PRECISION
            )
        partial += (at * groups + group.to(tl.int64)) * block_size * (width + value_width)
        store_wide(partial, dkey_ND, dkey_NE, column_N, column_N < block_size, width, D, E, SPLIT)
        store(partial + block_size * width, dvalue_NV, column_N, column_N < block_size, value_width, V)


@triton_kernel
def add_parts_kernel(
    partial,
    parts_before,
    block_begins,
    block_stops,
    dkey,
    dvalue,
    blocks,
    groups,
    block_size,
    width: tl.constexpr,
    value_width: tl.constexpr,
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
        part_ND, part_NE = load_wide(here, column_N, is_key_N, width, D, E, SPLIT)
        dkey_ND += part_ND
        if SPLIT:
            dkey_NE += part_NE
        dvalue_NV += load(here + block_size * width, column_N, is_key_N, value_width, V)
    row_N = key_N.to(tl.int64) * groups + group
    store_wide(dkey, dkey_ND, dkey_NE, row_N, is_key_N, width, D, E, SPLIT)
    store(dvalue, dvalue_NV, row_N, is_key_N, value_width, V)
