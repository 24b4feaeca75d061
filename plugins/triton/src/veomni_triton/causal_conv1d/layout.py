"""Which of its two layouts the kernels read a tensor ``[B, C, S]`` in; a tensor of neither is copied."""

from __future__ import annotations

from torch import Tensor

from veomni_triton.aligned_rows import VECTOR_BYTES, begins_aligned, compact


def positions_of_a_vector(x: Tensor) -> int:
    """How many elements of ``x`` a thread loads at once."""
    return VECTOR_BYTES // x.element_size()


def has_adjacent_positions(x: Tensor) -> bool:
    """Whether ``x`` is read along positions: they are adjacent, and fill whole vectors."""
    # Rows of another length would begin at other alignments, and each thread would load single elements.
    return x.stride(2) == 1 and x.stride(1) != 1 and x.shape[2] % positions_of_a_vector(x) == 0


def adjacent_positions(x: Tensor) -> Tensor:
    """``x``, or a copy whose positions are adjacent and aligned."""
    return x if x.stride(2) == 1 and begins_aligned(x) else compact(x)


def adjacent_channels(x: Tensor) -> Tensor:
    """``x``, or a copy whose channels are adjacent and aligned."""
    rows = x.transpose(1, 2)
    return x if x.stride(1) == 1 and begins_aligned(rows) else compact(rows).transpose(1, 2)


def empty_like(x: Tensor) -> Tensor:
    """An uninitialised ``[B, C, S]`` without gaps, in the layout that ``x`` is read in."""
    batch, channels, positions = x.shape
    if has_adjacent_positions(x):
        return x.new_empty(batch, channels, positions)
    return x.new_empty(batch, positions, channels).transpose(1, 2)
