"""What rows see, in device code: the ranges of keys that a mask leaves, the rows of a tile, and a tile's scores.

A row is a query of one head. A tile has neighbouring rows of all heads of one key head, the heads of a query one after
the other. What a row sees are the keys from its begin to its stop, less what its mask hides there.

Reading a mask takes more registers than there are. Tiles that read none are a launch's, and all others another's.

Shape legend: that of ``attention_tiles``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from veomni_ops.triton_launches import triton_kernel
from veomni_triton.activations import tanh

# A row's kind, where it is not 0.
READ = tl.constexpr(1)  # its mask hides keys between begin and stop, or adds numbers: the scores take it
LOW = tl.constexpr(2)  # the same, and the largest number is below `VERY_LOW`; the row sees all keys but those of -inf
NONE = tl.constexpr(0x7FFFFFFF)  # where no key is
VERY_LOW = tl.constexpr(-1e3)  # beside such numbers float32 loses scores: next to -1e9, there is only every 64th one
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# No pointer that is read in wide pieces depends on these; each combination of their divisibility would be compiled.
NOT_SPECIALIZED = ["queries", "keys", "heads", "groups", "range_batch", "range_head", "range_part"]


@triton_kernel(do_not_specialize=NOT_SPECIALIZED)
def ranges_kernel(
    mask,  # [Bm, Hm, S, L]; booleans as bytes
    ranges,  # [4, Bm, Hm, S] int32, written: begins, stops, kinds, and the bits of the largest numbers
    half,  # half of the lowest number of mask's dtype
    heads,  # Hm
    queries,  # S
    keys,  # L
    mask_batch,
    mask_head,
    mask_row,
    mask_key,
    BOOLEAN: tl.constexpr,
    SINKS: tl.constexpr,
    N: tl.constexpr,
):
    """What each row of a mask sees; a program has one. Beside ``SINKS``, keys that all are hidden count for nothing.

    A row's weights don't depend on a number that is added to all of its scores, so the largest one is subtracted: the
    logarithm of the sum of a row of ``-1e9`` would not hold the sum. Sinks are beside the scores, so nothing is there.
    """
    query, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = mask + batch.to(tl.int64) * mask_batch + head.to(tl.int64) * mask_head + query.to(tl.int64) * mask_row
    begin, low_begin = tl.full([], NONE, tl.int32), tl.full([], NONE, tl.int32)
    stop, low_stop, alike = tl.zeros([], tl.int32), tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    largest = tl.full([], 0.0 if BOOLEAN or SINKS else float("-inf"), tl.float32)
    for start in range(0, keys, N):
        key_N = start + tl.arange(0, N)
        is_key_N = key_N < keys
        value_N = tl.load(row + key_N.to(tl.int64) * mask_key, mask=is_key_N, other=0)
        if BOOLEAN:
            seen_N = is_key_N & (value_N != 0)
            alike_N = seen_N
        else:
            value_N = value_N.to(tl.float32)
            seen_N = is_key_N & (value_N > half)
            if not SINKS:
                low_N = is_key_N & (value_N > float("-inf"))
                low_begin = tl.minimum(low_begin, tl.min(tl.where(low_N, key_N, NONE), 0))
                low_stop = tl.maximum(low_stop, tl.max(tl.where(low_N, key_N + 1, 0), 0))
                larger = tl.maximum(largest, tl.max(tl.where(is_key_N, value_N, float("-inf")), 0))
                alike = tl.where(larger > largest, 0, alike)
                largest = larger
            alike_N = is_key_N & (value_N == largest)
        begin = tl.minimum(begin, tl.min(tl.where(seen_N, key_N, NONE), 0))
        stop = tl.maximum(stop, tl.max(tl.where(seen_N, key_N + 1, 0), 0))
        alike += tl.sum(alike_N.to(tl.int32), 0)
    if not BOOLEAN and not SINKS:
        begin, stop = tl.where(stop > 0, begin, low_begin), tl.where(stop > 0, stop, low_stop)
    kind = tl.where(largest <= VERY_LOW, LOW, tl.where(alike < stop - begin, READ, 0))
    kind = tl.where(stop > 0, kind, 0)
    place = ranges + (batch * heads + head).to(tl.int64) * queries + query
    part = tl.num_programs(2).to(tl.int64) * heads * queries
    tl.store(place, tl.where(stop > 0, begin, 0))
    tl.store(place + part, stop)
    tl.store(place + 2 * part, kind)
    tl.store(place + 3 * part, tl.where(kind > 0, largest, 0.0).to(tl.int32, bitcast=True))


@triton_kernel(do_not_specialize=NOT_SPECIALIZED)
def seeing_kernel(
    ranges,  # [4, Bm, Hm, S]
    seeing,  # [5, Bm, tiles of keys] int32, written
    heads,  # Hm
    queries,  # S
    range_part,
    N: tl.constexpr,
    Q: tl.constexpr,
    R: tl.constexpr,
):
    """The blocks of ``Q`` queries that see some of a tile of ``N`` keys; a program has a tile.

    Written are the first of these queries, the last and one, the first of those in blocks whose queries all see all of
    the tile and read no mask, how many these are (0 unless they follow each other), and whether one reads a mask.
    """
    tile, batch = tl.program_id(0), tl.program_id(1)
    first, last = tl.full([], NONE, tl.int32), tl.zeros([], tl.int32)
    whole, end = tl.full([], NONE, tl.int32), tl.zeros([], tl.int32)
    wide, reads = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    for start in range(0, queries, R * Q):
        block_R = start + tl.arange(0, R) * Q
        query_RQ = block_R[:, None] + tl.arange(0, Q)[None, :]
        is_query_RQ = query_RQ < queries
        some_R, every_R = tl.zeros([R], tl.int32), tl.full([R], 1, tl.int32)
        for head in range(0, heads):
            place = ranges + (batch * heads + head).to(tl.int64) * queries
            begin_RQ, stop_RQ, kind_RQ, _ = row_range(place + query_RQ, is_query_RQ, range_part)
            is_some_RQ = (begin_RQ < tile * N + N) & (stop_RQ > tile * N) & (begin_RQ < stop_RQ)
            is_every_RQ = (begin_RQ <= tile * N) & (stop_RQ >= tile * N + N) & (kind_RQ == 0)
            some_R = tl.maximum(some_R, tl.max(is_some_RQ.to(tl.int32), 1))
            every_R = tl.minimum(every_R, tl.min(is_every_RQ.to(tl.int32), 1))
            reads = tl.maximum(reads, tl.max(tl.max(tl.where(is_some_RQ, kind_RQ, 0), 1), 0))
        first = tl.minimum(first, tl.min(tl.where(some_R > 0, block_R, NONE), 0))
        last = tl.maximum(last, tl.max(tl.where(some_R > 0, block_R + Q, 0), 0))
        whole = tl.minimum(whole, tl.min(tl.where(every_R > 0, block_R, NONE), 0))
        end = tl.maximum(end, tl.max(tl.where(every_R > 0, block_R + Q, 0), 0))
        wide += tl.sum(every_R, 0) * Q
    last = tl.minimum(last, queries)
    place = seeing + batch * tl.num_programs(0) + tile
    part = tl.num_programs(1) * tl.num_programs(0)
    tl.store(place, tl.minimum(first, last))
    tl.store(place + part, last)
    tl.store(place + 2 * part, tl.minimum(whole, last))
    tl.store(place + 3 * part, tl.where(whole + wide == end, wide, 0))
    tl.store(place + 4 * part, reads)


@triton.jit
def tile_rows(
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
    """Of a tile's rows: query, head, whether there is one, begin (:data:`NONE` if nothing is seen), stop, kind and the
    largest number that their masks add.

    If ``HALVED``, the tile is ``MASKED``'s or another launch's, which then has the rows.
    """
    is_row_M = row_M < rows
    query_M = row_M // per_group
    head_M = group * per_group + row_M % per_group
    place_M = ranges + batch * range_batch + head_M.to(tl.int64) * range_head + query_M
    begin_M, stop_M, kind_M, largest_M = row_range(place_M, is_row_M, range_part)
    if HALVED:
        is_row_M = is_row_M & ((tl.max(kind_M, 0) > 0) == MASKED)
        stop_M = tl.where(is_row_M, stop_M, 0)
    return query_M, head_M, is_row_M, tl.where(begin_M < stop_M, begin_M, NONE), stop_M, kind_M, largest_M


@triton.jit
def row_range(place_M, is_row_M, range_part):
    """A row's begin, stop, kind, and the largest number that its mask adds, from where its begin is."""
    begin_M = tl.load(place_M, mask=is_row_M, other=0)
    stop_M = tl.load(place_M + range_part, mask=is_row_M, other=0)
    kind_M = tl.load(place_M + 2 * range_part, mask=is_row_M, other=0)
    largest_M = tl.load(place_M + 3 * range_part, mask=is_row_M, other=0).to(tl.float32, bitcast=True)
    return begin_M, stop_M, kind_M, largest_M


@triton.jit
def mask_rows(query_M, head_M, mask_head, mask_row, LARGE: tl.constexpr):
    """Where the rows of a sequence's mask begin. Of int32 unless it is ``LARGE``: pointers fill the registers."""
    if LARGE:
        query_M, head_M = query_M.to(tl.int64), head_M.to(tl.int64)
    return head_M * mask_head + query_M * mask_row


@triton.jit
def mask_keys(key_N, mask_key, LARGE: tl.constexpr):
    """Where the keys of a mask's row are."""
    if LARGE:
        key_N = key_N.to(tl.int64)
    return key_N * mask_key


@triton.jit
def scores(
    product_MN,
    seen_MN,
    kind_MN,
    largest_MN,
    place_MN,
    mask,
    scaling,
    softcap,
    CAPPED: tl.constexpr,
    MASKED: tl.constexpr,
    BOOLEAN: tl.constexpr,
    LOSES: tl.constexpr,
):
    """What a tile's scores to base 2 are made of, ``score * scale + shift``, and what of ``seen`` booleans leave.

    ``slope`` is the derivative of scores by ``product * scaling``. ``scale`` is one number, or one for each row.
    """
    score_MN, scale, shift_MN, slope_MN = product_MN, scaling, 0.0, 1.0
    if CAPPED:
        score_MN, scale = tanh(product_MN * scaling), softcap
        slope_MN = 1.0 - score_MN * score_MN
    if MASKED:
        value_MN = tl.load(mask + place_MN, mask=seen_MN & (kind_MN > 0), other=1 if BOOLEAN else 0.0)
        if BOOLEAN:
            seen_MN = seen_MN & (value_MN != 0)
        else:  # a key that a number hides is so far below the largest one that its weight is 0
            value_MN = value_MN.to(tl.float32)
            if LOSES:  # what float32 has left of a score beside the number. A row's factors take few registers
                is_low_MN = kind_MN == LOW
                value_MN = tl.fma(score_MN, tl.where(is_low_MN, scale * LN_2, 0.0), value_MN)
                scale = tl.where(is_low_MN, 0.0, scale)
            shift_MN = (value_MN - largest_MN) * LOG2_E
    return score_MN, scale, shift_MN, seen_MN, slope_MN
