"""Scores of a tile of queries and keys, and the highest ones of a row.

Shape legend: ``M`` queries, ``N`` keys, ``D`` columns of a head, padded to a power of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

from veomni_ops.triton_launches import triton_kernel

LARGEST = tl.constexpr(3.4028234663852886e38)  # of float32


@triton_kernel
def scores_kernel(
    query,
    key,
    weights,
    visible,
    scores,
    first,
    rows,
    keys,
    heads,
    width,
    M: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    BOOLS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``scores[rows, keys]`` of one batch row's queries from ``first`` on; ``-inf`` where they don't see a key.

    They are written as unsigned integers of the same order, which the search for the highest compares.
    """
    row_M = tl.program_id(0) * M + tl.arange(0, M)
    key_N = tl.program_id(1) * N + tl.arange(0, N)
    column_D = tl.arange(0, D)
    is_row_M, is_key_N = row_M < rows, key_N < keys
    query_M = (first + row_M).to(tl.int64)
    if BOOLS:
        place_MN = query_M[:, None] * keys + key_N[None, :]
        seen_MN = tl.load(visible + place_MN, mask=is_row_M[:, None] & is_key_N[None, :], other=0) != 0
    else:
        begin_M = tl.load(visible + 2 * query_M, mask=is_row_M, other=0)
        stop_M = tl.load(visible + 2 * query_M + 1, mask=is_row_M, other=0)
        seen_MN = (key_N[None, :] >= begin_M[:, None]) & (key_N[None, :] < stop_M[:, None]) & is_key_N[None, :]
    sum_MN = tl.zeros([M, N], dtype=tl.float32)
    if tl.max(tl.max(seen_MN.to(tl.int32), 1), 0) > 0:
        inside_ND = is_key_N[:, None] & (column_D < width)[None, :]
        key_ND = tl.load(key + key_N.to(tl.int64)[:, None] * width + column_D[None, :], mask=inside_ND, other=0.0)
        inside_MD = is_row_M[:, None] & (column_D < width)[None, :]
        for head in range(heads):
            of_head_M = query_M * heads + head
            query_MD = tl.load(query + of_head_M[:, None] * width + column_D[None, :], mask=inside_MD, other=0.0)
            weight_M = tl.load(weights + of_head_M, mask=is_row_M, other=0.0)
            product_MN = tl.dot(query_MD, tl.trans(key_ND), input_precision=PRECISION)
            # Not tl.maximum, which gives 0 for NaN.
            sum_MN += tl.where(product_MN < 0.0, 0.0, product_MN) * weight_M[:, None]
    bounded_MN = tl.minimum(tl.maximum(sum_MN, -LARGEST), LARGEST)  # so that NaN alone is higher
    sum_MN = tl.where(sum_MN == sum_MN, bounded_MN, float("inf"))
    sum_MN = tl.where(seen_MN, sum_MN, float("-inf"))
    sum_MN = tl.where(sum_MN == 0.0, 0.0, sum_MN)  # -0.0 is as high as 0.0
    bits_MN = sum_MN.to(tl.uint32, bitcast=True)
    ordered_MN = tl.where(bits_MN >> 31 != 0, bits_MN ^ 0xFFFFFFFF, bits_MN | 0x80000000)
    into_MN = scores + row_M.to(tl.int64)[:, None] * keys + key_N[None, :]
    tl.store(into_MN, ordered_MN.to(tl.int32, bitcast=True), mask=is_row_M[:, None] & is_key_N[None, :])


@triton.jit
def _ordered(scores, row_R, key_N, rows, keys):
    """``[R, N]`` of the scores as unsigned integers, 0 past the last row and key."""
    inside_RN = (row_R < rows)[:, None] & (key_N < keys)[None, :]
    place_RN = scores + row_R.to(tl.int64)[:, None] * keys + key_N[None, :]
    return tl.load(place_RN, mask=inside_RN, other=0).to(tl.uint32, bitcast=True)


@triton_kernel
def highest_kernel(
    scores, visible, found, rows, keys, top_k, NONE: tl.constexpr, BOOLS: tl.constexpr, R: tl.constexpr, N: tl.constexpr
):
    """Write the places of each row's ``top_k`` highest scores, rising; of equal ones the first.

    The least of them is found by two bits at a time, from the highest on: of three candidates, how many scores are as
    high. ``NONE`` is what ``-inf`` is in order. A program has ``R`` rows, and reads ``N`` keys of each at a time, up to
    the last that one of the rows sees.
    """
    row_R, key_N = tl.program_id(0) * R + tl.arange(0, R), tl.arange(0, N)
    found_R1 = found + (row_R.to(tl.int64) * top_k)[:, None]
    stop = keys
    if not BOOLS:
        stop = tl.max(tl.load(visible + 2 * row_R.to(tl.int64) + 1, mask=row_R < rows, other=0), 0)
    least_R = tl.zeros([R], dtype=tl.uint32)
    higher_R = tl.zeros([R], dtype=tl.int32)  # scores above all that ``least_R`` can become
    one_R = tl.full([R], 1, dtype=tl.uint32)
    for step in range(16):
        third_R = least_R | (one_R << (31 - 2 * step)) | (one_R << (30 - 2 * step))
        second_R = least_R | (one_R << (31 - 2 * step))
        first_R = least_R | (one_R << (30 - 2 * step))
        third_RN = tl.zeros([R, N], dtype=tl.int32)
        second_RN = tl.zeros([R, N], dtype=tl.int32)
        first_RN = tl.zeros([R, N], dtype=tl.int32)
        for start in range(0, stop, N):
            ordered_RN = _ordered(scores, row_R, start + key_N, rows, keys)
            third_RN += (ordered_RN >= third_R[:, None]).to(tl.int32)
            second_RN += (ordered_RN >= second_R[:, None]).to(tl.int32)
            first_RN += (ordered_RN >= first_R[:, None]).to(tl.int32)
        thirds_R, seconds_R, firsts_R = tl.sum(third_RN, 1), tl.sum(second_RN, 1), tl.sum(first_RN, 1)
        higher_R = tl.where(thirds_R < top_k, thirds_R, higher_R)
        higher_R = tl.where(seconds_R < top_k, seconds_R, higher_R)
        higher_R = tl.where(firsts_R < top_k, firsts_R, higher_R)
        least_R = tl.where(firsts_R >= top_k, first_R, least_R)
        least_R = tl.where(seconds_R >= top_k, second_R, least_R)
        least_R = tl.where(thirds_R >= top_k, third_R, least_R)
    left_R, written_R = top_k - higher_R, tl.zeros([R], dtype=tl.int32)
    for start in range(0, stop, N):
        ordered_RN = _ordered(scores, row_R, start + key_N, rows, keys)
        seen_RN = ordered_RN > NONE
        equal_RN = ((ordered_RN == least_R[:, None]) & seen_RN).to(tl.int32)
        taken_RN = equal_RN * (tl.cumsum(equal_RN, 1) <= left_R[:, None]).to(tl.int32)
        chosen_RN = taken_RN + ((ordered_RN > least_R[:, None]) & seen_RN).to(tl.int32)
        place_RN = written_R[:, None] + tl.cumsum(chosen_RN, 1) - 1
        key_RN = tl.zeros([R, N], dtype=tl.int32) + (start + key_N)[None, :]
        tl.store(found_R1 + place_RN, key_RN, mask=chosen_RN != 0)
        left_R -= tl.sum(taken_RN, 1)
        written_R += tl.sum(chosen_RN, 1)
    for start in range(0, top_k, N):
        place_RN = tl.zeros([R, N], dtype=tl.int32) + (start + key_N)[None, :]
        is_left_RN = (place_RN >= written_R[:, None]) & (place_RN < top_k) & (row_R < rows)[:, None]
        tl.store(found_R1 + place_RN, tl.zeros([R, N], dtype=tl.int32) - 1, mask=is_left_RN)
