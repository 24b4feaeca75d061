"""Tensors as the kernels read them: rows whose alignment follows from their width alone.

Vector loads need aligned rows, and the width of a load decides in which order a row is summed. So a tensor that
happens to lie elsewhere is copied, rather than summed in another order.
"""

from __future__ import annotations

import torch
from torch import Tensor

VECTOR_BYTES = 16  # the widest load of one thread


def alignment(width: int, element_size: int) -> int:
    """How many elements each row's start is a multiple of: a vector load's, halved until it divides the width."""
    count = VECTOR_BYTES // element_size
    while width % count:
        count //= 2
    return count


def aligned_rows(x: Tensor) -> Tensor:
    """``x [..., H]`` as ``[T, H]``: a view where its rows are contiguous, evenly spaced and aligned, else a copy."""
    width = x.shape[-1]
    rows = x.reshape(-1, width)
    is_spaced = rows.stride(1) == 1 and rows.stride(0) % alignment(width, x.element_size()) == 0
    return rows if is_spaced and rows.data_ptr() % VECTOR_BYTES == 0 else _copy(rows)


def aligned_weight(weight: Tensor | None) -> Tensor | None:
    """``weight [H]``, or a copy of it where its elements are spaced or not aligned."""
    if weight is None or (weight.is_contiguous() and weight.data_ptr() % VECTOR_BYTES == 0):
        return weight
    return _copy(weight)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)
