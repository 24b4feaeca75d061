"""Tensors as the kernels read them: ``[T, H]`` with rows whose alignment follows from ``H`` alone.

Vector loads need aligned rows. The width of a load decides which elements a thread holds, and so in which order a row
is summed. A tensor at another alignment is therefore copied: read with narrower loads, its rows would give other bits.
"""

from __future__ import annotations

from typing import overload

import torch
from torch import Tensor

VECTOR_BYTES = 16  # the widest load of one thread


def alignment(width: int, element_size: int) -> int:
    """The alignment of rows of ``width`` elements, in elements: a vector load's, halved until it divides the width."""
    # What contiguous rows from an aligned address have of themselves; more would force most tensors to be copied.
    count = VECTOR_BYTES // element_size
    while width % count:
        count //= 2
    return count


def begins_aligned(x: Tensor) -> bool:
    """Whether every row of ``x [..., H]`` can be loaded 16 bytes at a time; true too where no layout would allow it."""
    vector = VECTOR_BYTES // x.element_size()
    if x.shape[-1] % vector:
        return True
    starts = (stride for size, stride in zip(x.shape[:-1], x.stride(), strict=False) if size > 1)
    return x.data_ptr() % VECTOR_BYTES == 0 and not any(start % vector for start in starts)


def aligned_rows(x: Tensor) -> Tensor:
    """``x [..., H]`` as ``[T, H]``: a view where its rows are contiguous, evenly spaced and aligned, else a copy."""
    width = x.shape[-1]
    rows = x.reshape(-1, width)
    # One stride per row is all that the kernels take, and it is passed in units of the alignment.
    is_spaced = rows.stride(1) == 1 and rows.stride(0) % alignment(width, x.element_size()) == 0
    return rows if is_spaced and rows.data_ptr() % VECTOR_BYTES == 0 else compact(rows)


@overload
def aligned_weight(weight: Tensor) -> Tensor: ...


@overload
def aligned_weight(weight: None) -> None: ...


@overload
def aligned_weight(weight: Tensor | None) -> Tensor | None: ...


def aligned_weight(weight: Tensor | None) -> Tensor | None:
    """``weight [H]``, or a copy of it where its elements are spaced or not aligned."""
    if weight is None or (weight.is_contiguous() and weight.data_ptr() % VECTOR_BYTES == 0):
        return weight
    return compact(weight)


def compact(tensor: Tensor) -> Tensor:
    """A copy without gaps at an aligned address, also of a tensor that is contiguous at another one."""
    return tensor.clone(memory_format=torch.contiguous_format)
