"""Time steps and cumulated log-decays of a chunk's tokens, and the gradients of what they are computed from.

Programs have a few neighbouring heads, since heads lie together in ``dt``, and write each head's tokens together.

Shape legend: ``L`` tokens of a chunk, ``H`` heads in a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from veomni_ops.triton_launches import triton_kernel
from veomni_triton.mamba2_scan.tiles import NUMBERS, chunk_bounds
from veomni_triton.softplus import softplus

HEADS = 16  # of a program: their time steps lie together
NOT_SPECIALIZED = (*NUMBERS, *(f"{x}_{by}" for x in ("dt", "ddt", "seq") for by in ("batch", "token", "head")))


@triton.jit
def _raw_steps(
    dt, bias, row, chunk, head_H, heads, inside_LH, dt_batch, dt_token, dt_head, HAS_BIAS: tl.constexpr, L: tl.constexpr
):
    """``dt`` with its bias, in float32."""
    token_L = (chunk * L + tl.arange(0, L)).to(tl.int64)
    place_LH = dt + row.to(tl.int64) * dt_batch + token_L[:, None] * dt_token + head_H[None, :].to(tl.int64) * dt_head
    raw_LH = tl.load(place_LH, mask=inside_LH, other=0.0).to(tl.float32)
    if HAS_BIAS:
        raw_LH += tl.load(bias + head_H, mask=head_H < heads, other=0.0).to(tl.float32)[None, :]
    return raw_LH


@triton_kernel(do_not_specialize=NOT_SPECIALIZED)
def steps_kernel(
    dt,  # [B, S, H]
    A,  # [H]
    bias,  # [H], or anything
    seq_idx,  # [B, S] integers, or anything
    steps,  # [B, H, chunks, L] float32: the time step of each token, 0 after the last
    high,  # [B, H, chunks, L] float32: the log-decays of the chunk's tokens, added up
    low,  # what float32 loses of them
    parts,  # [B, chunks, L] int32: how many sequences begin in the chunk up to each token, or anything
    least,
    most,
    dt_batch,
    dt_token,
    dt_head,
    seq_batch,
    seq_token,
    length,
    chunks,
    heads,
    HAS_BIAS: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    PACKED: tl.constexpr,
    L: tl.constexpr,
    H: tl.constexpr,
):
    place, block = tl.program_id(0), tl.program_id(1)
    row, chunk, _first, count = chunk_bounds(place, chunks, length, L)
    row_L, head_H = tl.arange(0, L), block * H + tl.arange(0, H)
    inside_LH = (row_L < count)[:, None] & (head_H < heads)[None, :]
    step_LH = _raw_steps(dt, bias, row, chunk, head_H, heads, inside_LH, dt_batch, dt_token, dt_head, HAS_BIAS, L)
    if SOFTPLUS:
        step_LH, _ = softplus(step_LH)
    step_LH = tl.minimum(
        tl.maximum(step_LH, least, propagate_nan=tl.PropagateNan.ALL), most, propagate_nan=tl.PropagateNan.ALL
    )
    step_LH = tl.where(inside_LH, step_LH, 0.0)
    decay_LH = step_LH * tl.load(A + head_H, mask=head_H < heads, other=0.0).to(tl.float32)[None, :]
    sum_LH = tl.cumsum(tl.where(inside_LH, decay_LH, 0.0).to(tl.float64), axis=0)
    high_LH = sum_LH.to(tl.float32)
    at_LH = ((row * heads + head_H).to(tl.int64)[None, :] * chunks + chunk) * L + row_L[:, None]
    written_LH = (row_L < L)[:, None] & (head_H < heads)[None, :]
    tl.store(steps + at_LH, step_LH, mask=written_LH)
    tl.store(high + at_LH, high_LH, mask=written_LH)
    tl.store(low + at_LH, (sum_LH - high_LH.to(tl.float64)).to(tl.float32), mask=written_LH)
    if PACKED and block == 0:
        token_L = (chunk * L + row_L).to(tl.int64)
        number_L = seq_idx + row.to(tl.int64) * seq_batch + token_L * seq_token
        compared_L = (row_L < count) & (token_L > 0)
        own_L = tl.load(number_L, mask=compared_L, other=0)
        begins_L = own_L != tl.load(number_L - seq_token, mask=compared_L, other=0)
        part_L = tl.cumsum(begins_L.to(tl.int32), axis=0)
        tl.store(parts + place.to(tl.int64) * L + row_L, part_L)


@triton_kernel(do_not_specialize=(*NOT_SPECIALIZED, "state_tiles", "programs"))
def step_gradients_kernel(
    dt,  # [B, S, H]
    A,  # [H]
    bias,  # [H], or anything
    steps,  # of steps_kernel, as high and parts
    high,
    parts,
    step_known,  # of pair_gradients_kernel, as written and pairs
    written,
    pairs,
    read,  # of product_gradients_kernel, as over
    over,
    ddt,  # [B, S, H], contiguous
    dA,  # [B * chunks, H] float32: what is to be added up
    dbias,  # the same
    least,
    most,
    dt_batch,
    dt_token,
    dt_head,
    length,
    chunks,
    heads,
    state_tiles,
    programs,  # B * H * chunks
    HAS_BIAS: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    PACKED: tl.constexpr,
    L: tl.constexpr,
    H: tl.constexpr,
):
    place, block = tl.program_id(0), tl.program_id(1)
    row, chunk, first, count = chunk_bounds(place, chunks, length, L)
    row_L, head_H = tl.arange(0, L), block * H + tl.arange(0, H)
    is_head_H = head_H < heads
    inside_LH = (row_L < count)[:, None] & is_head_H[None, :]
    own_H = (row * heads + head_H).to(tl.int64) * chunks + chunk
    at_LH = own_H[None, :] * L + row_L[:, None]
    valid_LH = (row_L < L)[:, None] & is_head_H[None, :]
    before_LH = (row_L > 0)[:, None] & is_head_H[None, :]
    step_LH = tl.load(steps + at_LH, mask=valid_LH, other=0.0)
    previous_LH = tl.load(steps + at_LH - 1, mask=before_LH, other=0.0)
    dstep_LH = tl.load(step_known + at_LH, mask=valid_LH, other=0.0)
    # A sum of log-decays has a part in what reads across its last token: tokens from there on that read, and tokens
    # before that write. Nothing is taken off again, so that a small gradient keeps its digits beside large ones.
    reading_LH = tl.load(pairs + at_LH, mask=valid_LH, other=0.0)
    writing_LH = tl.load(written + at_LH - 1, mask=before_LH, other=0.0)
    over_H = tl.zeros([H], tl.float32)
    size = tl.cast(programs, tl.int64)
    for tile in range(0, state_tiles):
        reading_LH += tl.load(read + tile * size * L + at_LH, mask=valid_LH, other=0.0)
        over_H += tl.load(over + tile * size + own_H, mask=is_head_H, other=0.0)
    left_H = tl.exp(tl.load(high + own_H * L + L - 1, mask=is_head_H, other=0.0))
    if PACKED:
        left_H = tl.where(tl.load(parts + place.to(tl.int64) * L + L - 1) == 0, left_H, 0.0)
    ddecay_LH = tl.cumsum(reading_LH, axis=0, reverse=True).to(tl.float32)
    ddecay_LH += tl.cumsum(writing_LH * previous_LH, axis=0)
    ddecay_LH += (over_H * left_H)[None, :]
    at_H = place.to(tl.int64) * heads + head_H
    tl.store(dA + at_H, tl.sum(tl.where(inside_LH, ddecay_LH * step_LH, 0.0), axis=0), mask=is_head_H)
    dstep_LH += ddecay_LH * tl.load(A + head_H, mask=is_head_H, other=0.0).to(tl.float32)[None, :]
    raw_LH = _raw_steps(dt, bias, row, chunk, head_H, heads, inside_LH, dt_batch, dt_token, dt_head, HAS_BIAS, L)
    if SOFTPLUS:
        raw_LH, share_LH = softplus(raw_LH)
        dstep_LH *= share_LH
    dstep_LH = tl.where((raw_LH < least) | (raw_LH > most) | (inside_LH == 0), 0.0, dstep_LH)
    tl.store(dbias + at_H, tl.sum(dstep_LH, axis=0), mask=is_head_H)
    token_L = (first + row_L).to(tl.int64)
    tl.store(ddt + token_L[:, None] * heads + head_H[None, :], dstep_LH.to(ddt.dtype.element_ty), mask=inside_LH)
