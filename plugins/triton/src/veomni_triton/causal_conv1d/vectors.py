"""What a program of :mod:`positions_adjacent` loads and stores: vectors of neighbouring positions, one for each lane.

A vector is taken apart into a tuple of positions, and put together again, within each thread. A thread that loads a
lane's vector has all of it: halving it again and again moves nothing to another thread.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def vectors_of(
    rows,  # [L], pointers to the first position of each lane's channel
    position,  # [L], of each lane's own vector
    positions,
    inside,  # [L]
    FIRST: tl.constexpr,
    END: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """A tuple of the positions of all vectors from ``FIRST`` to before ``END``, where 0 is a lane's own."""
    values = ()
    for vector in tl.static_range(FIRST, END):
        start = position + vector * VECTOR
        at = (rows + start)[:, None] + tl.arange(0, VECTOR)[None, :]  # [L, VECTOR]
        exists = inside & (start >= 0) & (start < positions)
        values = values + apart(tl.load(at, mask=exists[:, None], other=0.0).to(tl.float32), LANES, VECTOR)
    return values


@triton.jit
def numbers_of(
    seq_idx,  # [S], of one sequence, or None
    position,  # [L], of each lane's own vector
    positions,
    FIRST: tl.constexpr,
    END: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """The numbers of the sequences that :func:`vectors_of`' positions belong to; 0 if they aren't packed."""
    values = ()
    for vector in tl.static_range(FIRST, END):
        start = position + vector * VECTOR
        # Numbers don't decrease along a row: less than the first, and more than the last, are none of them. A lane's
        # own vector exists, or isn't written.
        beyond = (start >= positions).to(tl.int32) - (start < 0).to(tl.int32)
        if vector == 0:
            beyond = tl.zeros((LANES,), tl.int32)
        if seq_idx is None:
            for _ in tl.static_range(VECTOR):
                values = values + (beyond,)
        else:
            at = tl.minimum(tl.maximum(start[:, None] + tl.arange(0, VECTOR)[None, :], 0), positions - 1)
            values = values + apart(tl.load(seq_idx + at) + beyond[:, None], LANES, VECTOR)
    return values


@triton.jit
def store_vectors(rows, position, values, inside, LANES: tl.constexpr, VECTOR: tl.constexpr):
    """Write a tuple of a lane's positions, rounded once."""
    at = (rows + position)[:, None] + tl.arange(0, VECTOR)[None, :]  # [L, VECTOR]
    tl.store(at, together(values, LANES, VECTOR).to(rows.dtype.element_ty), mask=inside[:, None])


@triton.jit
def apart(vectors, LANES: tl.constexpr, COUNT: tl.constexpr):
    """The columns of ``vectors [LANES, COUNT]``, a power of two of them, as a tuple of blocks ``[LANES]``."""
    if COUNT == 1:
        return (tl.reshape(vectors, (LANES,)),)
    else:
        # Halves [LANES, COUNT / 2], which split takes from the last dimension.
        low, high = tl.split(tl.permute(tl.reshape(vectors, (LANES, 2, COUNT // 2)), (0, 2, 1)))
        return apart(low, LANES, COUNT // 2) + apart(high, LANES, COUNT // 2)


@triton.jit
def together(columns, LANES: tl.constexpr, COUNT: tl.constexpr):
    """``[LANES, COUNT]`` from a tuple of its columns."""
    if COUNT == 1:
        return tl.reshape(columns[0], (LANES, 1))
    else:
        low = together(columns[: COUNT // 2], LANES, COUNT // 2)
        high = together(columns[COUNT // 2 :], LANES, COUNT // 2)
        return tl.reshape(tl.permute(tl.join(low, high), (0, 2, 1)), (LANES, COUNT))
