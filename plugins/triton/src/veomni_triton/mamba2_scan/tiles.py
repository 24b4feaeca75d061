"""What the kernels of Mamba 2's scan share: tiles of tokens, and the decays of a chunk.

A chunk is ``L`` neighbouring tokens of one row of the batch. The last one of a row is filled up with tokens that
neither decay a state nor write. A place is a chunk of all heads, ``row * chunks + chunk``. Where each token of a head
has one number, they lie at ``[B, H, chunks, L]`` in float32.

Shape legend: ``L`` tokens of a chunk, ``P`` columns of a head in a tile, ``N`` columns of a state in a tile, ``D``
either.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Triton compiles a kernel anew for numbers that are 1 or multiples of 16. That pays for the strides of tiles alone.
NUMBERS = ("length", "chunks", "heads", "groups")


@triton.jit
def load_tile(x, first, count, stride, start, L: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr):
    """Columns ``start`` to ``start + D`` of a chunk's tokens; ``x`` points to the head of token 0."""
    row_L, column_D = tl.arange(0, L), start + tl.arange(0, D)
    inside_LD = (row_L < count)[:, None] & (column_D < WIDTH)[None, :]
    return tl.load(x + (first + row_L).to(tl.int64)[:, None] * stride + column_D[None, :], mask=inside_LD, other=0.0)


@triton.jit
def store_tile(x, tile_LD, first, count, stride, start, L: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr):
    """Write what :func:`load_tile` reads."""
    row_L, column_D = tl.arange(0, L), start + tl.arange(0, D)
    inside_LD = (row_L < count)[:, None] & (column_D < WIDTH)[None, :]
    place_LD = x + (first + row_L).to(tl.int64)[:, None] * stride + column_D[None, :]
    tl.store(place_LD, tile_LD.to(x.dtype.element_ty), mask=inside_LD)


@triton.jit
def load_state(states, start, column, P: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr, STATE: tl.constexpr):
    """``[P, N]`` of one state ``[WIDTH, STATE]``, from row ``start`` and ``column`` on."""
    row_P, column_N = start + tl.arange(0, P), column + tl.arange(0, N)
    inside_PN = (row_P < WIDTH)[:, None] & (column_N < STATE)[None, :]
    return tl.load(states + row_P[:, None] * STATE + column_N[None, :], mask=inside_PN, other=0.0)


@triton.jit
def store_state(
    states, state_PN, start, column, P: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr, STATE: tl.constexpr
):
    """Write what :func:`load_state` reads."""
    row_P, column_N = start + tl.arange(0, P), column + tl.arange(0, N)
    inside_PN = (row_P < WIDTH)[:, None] & (column_N < STATE)[None, :]
    tl.store(states + row_P[:, None] * STATE + column_N[None, :], state_PN.to(states.dtype.element_ty), mask=inside_PN)


@triton.jit
def chunk_bounds(place, chunks, length, L: tl.constexpr):
    """The row of a place, the chunk there, its first token among those of all rows, and how many it has."""
    row = place // chunks
    chunk = place % chunks
    return row, chunk, row * length + chunk * L, tl.minimum(length - chunk * L, L)


@triton.jit
def load_numbers(numbers, chunk, L: tl.constexpr):
    """One number for each token of a head's ``chunk``, which is numbered through all rows and heads."""
    return tl.load(numbers + tl.cast(chunk, tl.int64) * L + tl.arange(0, L))


@triton.jit
def store_numbers(numbers, number_L, chunk, L: tl.constexpr):
    """Write what :func:`load_numbers` reads."""
    tl.store(numbers + tl.cast(chunk, tl.int64) * L + tl.arange(0, L), number_L)


@triton.jit
def decays_since_start(high, chunk, parts, place, PACKED: tl.constexpr, L: tl.constexpr):
    """The decay from before the chunk to each token; zeros in sequences that begin inside."""
    since_L = tl.exp(load_numbers(high, chunk, L))
    if PACKED:
        since_L = tl.where(load_numbers(parts, place, L) == 0, since_L, 0.0)
    return since_L


@triton.jit
def decays_to_end(high, low, chunk, parts, place, PACKED: tl.constexpr, L: tl.constexpr):
    """The decay from each token to the chunk's last; zeros in sequences that end before."""
    last = tl.cast(chunk, tl.int64) * L + L - 1
    between_L = tl.load(high + last) - load_numbers(high, chunk, L)
    between_L += tl.load(low + last) - load_numbers(low, chunk, L)
    to_end_L = tl.exp(between_L)
    if PACKED:
        ends = tl.load(parts + tl.cast(place, tl.int64) * L + L - 1)
        to_end_L = tl.where(load_numbers(parts, place, L) == ends, to_end_L, 0.0)
    return to_end_L


@triton.jit
def decay_over_chunk(high, chunk, parts, place, PACKED: tl.constexpr, L: tl.constexpr):
    """The decay of the state before the chunk; 0 where a sequence begins inside."""
    decay = tl.exp(tl.load(high + tl.cast(chunk, tl.int64) * L + L - 1))
    if PACKED:
        decay = tl.where(tl.load(parts + tl.cast(place, tl.int64) * L + L - 1) == 0, decay, 0.0)
    return decay


@triton.jit
def pairwise_decays(high, low, chunk, parts, place, PACKED: tl.constexpr, L: tl.constexpr):
    """The decay from token ``j`` to ``i`` ``[i, j]``; zeros where ``j`` comes after, or is of another sequence.

    A cumulated sum is two numbers: the difference of single ones would lose the small decays that come after a large
    one.
    """
    row_L = tl.arange(0, L)
    high_L, low_L = load_numbers(high, chunk, L), load_numbers(low, chunk, L)
    between_LL = (high_L[:, None] - high_L[None, :]) + (low_L[:, None] - low_L[None, :])
    follows_LL = row_L[:, None] >= row_L[None, :]
    if PACKED:
        part_L = load_numbers(parts, place, L)
        follows_LL &= part_L[:, None] == part_L[None, :]
    return tl.exp(tl.where(follows_LL, between_LL, float("-inf")))


@triton.jit
def pairwise_decays_from(high, low, chunk, parts, place, PACKED: tl.constexpr, L: tl.constexpr):
    """:func:`pairwise_decays` transposed, ``[j, i]``."""
    row_L = tl.arange(0, L)
    high_L, low_L = load_numbers(high, chunk, L), load_numbers(low, chunk, L)
    between_LL = (high_L[None, :] - high_L[:, None]) + (low_L[None, :] - low_L[:, None])
    follows_LL = row_L[:, None] <= row_L[None, :]
    if PACKED:
        part_L = load_numbers(parts, place, L)
        follows_LL &= part_L[:, None] == part_L[None, :]
    return tl.exp(tl.where(follows_LL, between_LL, float("-inf")))
