"""Matrix products of rows that lie in groups, one matrix per group, by ``npu_grouped_matmul``.

``ends[E]``, int64, says where each group's rows end; the last end is the number of rows. The group sizes stay on the
device.
"""

from __future__ import annotations

from torch import Tensor

from veomni_npu.operators import npu

# What the operator's numbers mean: group_list holds ends, the result is one tensor, and which axis is cut into groups.
_ENDS, _ONE_TENSOR, _ROWS, _REDUCED_AXIS = 0, 3, 0, 2


def grouped_product(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """``[N, B]``: each group of ``rows[N, A]`` times its own of the ``matrices[E, A, B]``, contiguous or transposed."""
    return _grouped(rows, matrices, ends, _ROWS)


def grouped_outer(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """``[E, A, B]``: each group of ``left[N, A]``, transposed, times that of ``right[N, B]``; zeros if empty."""
    return _grouped(left.t(), right, ends, _REDUCED_AXIS)


def _grouped(left: Tensor, right: Tensor, ends: Tensor, group_type: int) -> Tensor:
    (result,) = npu.npu_grouped_matmul(
        [left], [right], group_list=ends, split_item=_ONE_TENSOR, group_type=group_type, group_list_type=_ENDS
    )
    return result  # type: ignore[no-any-return]
