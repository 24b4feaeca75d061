"""Where a program of :mod:`channels_adjacent` works, and what it loads there: tuples of neighbouring positions.

A block is ``[CHANNELS]``, adjacent channels of one position, in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def place(positions, run, channels, CHANNELS: tl.constexpr):
    """Where a program works.

    Returns its sequence (int64), its first position, the end of its run, its channels ``[CHANNELS]``, and the number of
    its run among those of all sequences (int64).
    """
    # Neighbours in the grid have neighbouring channels of one run.
    blocks = tl.cdiv(channels, CHANNELS)
    row, runs = tl.program_id(0) // blocks, tl.cdiv(positions, run)
    first = row % runs * run
    channel = tl.program_id(0) % blocks * CHANNELS + tl.arange(0, CHANNELS)
    return (row // runs).to(tl.int64), first, tl.minimum(first + run, positions), channel, row.to(tl.int64)


@triton.jit
def loaded(x, start, stride, inside, COUNT: tl.constexpr):
    """``COUNT`` positions from ``start`` on, all of which exist."""
    values = ()
    for step in tl.static_range(COUNT):
        at = x + tl.cast(start + step, tl.int64) * stride
        values = values + (tl.load(at, mask=inside, other=0.0).to(tl.float32),)
    return values


@triton.jit
def guarded(x, start, positions, stride, inside, COUNT: tl.constexpr):
    """``COUNT`` positions from ``start`` on, with zeros for those that don't exist."""
    values = ()
    for step in tl.static_range(COUNT):
        position = start + step
        exists = (position >= 0) & (position < positions)
        at = x + tl.cast(position, tl.int64) * stride
        values = values + (tl.load(at, mask=inside & exists, other=0.0).to(tl.float32),)
    return values


@triton.jit
def numbers_of(seq_idx, start, positions, COUNT: tl.constexpr):
    """The numbers of the sequences that ``COUNT`` positions belong to; 0 if they aren't packed."""
    values = ()
    for step in tl.static_range(COUNT):
        position = start + step
        # Numbers don't decrease along a row: less than the first, and more than the last, are none of them.
        beyond = (position >= positions).to(tl.int32) - (position < 0).to(tl.int32)
        if seq_idx is None:
            values = values + (beyond,)
        else:
            values = values + (tl.load(seq_idx + tl.minimum(tl.maximum(position, 0), positions - 1)) + beyond,)
    return values


@triton.jit
def zeros(like, COUNT: tl.constexpr):
    """``COUNT`` blocks of zeros."""
    values = ()
    for _ in tl.static_range(COUNT):
        values = values + (tl.zeros(like.shape, tl.float32),)
    return values
