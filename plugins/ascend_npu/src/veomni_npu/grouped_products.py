"""Grouped GEMMs by ``npu_grouped_matmul``: consecutive groups of rows, each multiplied by its own matrix.

``ends[E]``, int64, is the end row of each group; the last one is the number of rows. Group sizes stay on the device.

Shapes: N rows, E groups (experts), A columns of the left operand, B columns of the right one.
"""

from __future__ import annotations

from torch import Tensor

from veomni_npu.operators import npu

# The operator's codes. group_list_type: group_list holds end rows. split_item: the result is one tensor. group_type:
# the axis that is split into groups, either the rows (M) or the reduced axis (K).
_ENDS, _ONE_TENSOR, _ROWS, _REDUCED_AXIS = 0, 3, 0, 2


def grouped_product(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """``[N, B]``: each group of ``rows[N, A]`` times its matrix in ``matrices[E, A, B]``, contiguous or transposed."""
    return _grouped(rows, matrices, ends, _ROWS)


def grouped_outer(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """``[E, A, B]``: per group, ``left[N, A]`` transposed times ``right[N, B]``; zeros for an empty group."""
    return _grouped(left.t(), right, ends, _REDUCED_AXIS)


def _grouped(left: Tensor, right: Tensor, ends: Tensor, group_type: int) -> Tensor:
    (result,) = npu.npu_grouped_matmul(
        [left], [right], group_list=ends, split_item=_ONE_TENSOR, group_type=group_type, group_list_type=_ENDS
    )
    return result
