"""npu_grouped_matmul: one matrix product per group of rows, or of columns. The library gives it no backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from npu_sim.operators.limits import require, require_dims, require_dtype, require_same_dtype

NAME = "npu_grouped_matmul"
SCHEMAS = {
    "npu_grouped_matmul": (
        "(Tensor[] x, Tensor[] weight, *, Tensor[]? bias=None, Tensor[]? scale=None, Tensor[]? offset=None, "
        "Tensor[]? antiquant_scale=None, Tensor[]? antiquant_offset=None, Tensor[]? per_token_scale=None, "
        "Tensor? group_list=None, Tensor[]? activation_input=None, Tensor[]? activation_quant_scale=None, "
        "Tensor[]? activation_quant_offset=None, int? split_item=0, int? group_type=None, int? group_list_type=0, "
        "int? act_type=0, int[]? tuning_config=None, int? output_dtype=None, int? x_dtype=None, "
        "int? weight_dtype=None, int? scale_dtype=None, int? per_token_scale_dtype=None) -> Tensor[]"
    ),
}
ROWS, REDUCED = 0, 2  # group_type: which axis of C[m, n] = A[m, k] B[k, n] is cut into groups, m or k
CUMULATIVE, COUNTS = 0, 1  # group_list_type
MOST_GROUPS = 1024
INNER_LIMIT = 65536


def npu_grouped_matmul(
    x: list[Tensor],
    weight: list[Tensor],
    *,
    group_list: Tensor | None = None,
    split_item: int = 0,
    group_type: int | None = None,
    group_list_type: int = CUMULATIVE,
    **unused: Any,
) -> list[Tensor]:
    """The products of one ``x`` and one ``weight``, unquantised, in one tensor of the dtype of ``x``.

    ``group_type`` 0: rows of x [M, K] in groups, with weight [E, K, N], give [M, N]. 2: columns of x [M, K] (the
    transpose of a [K, M] tensor), and rows of weight [K, N], in groups, give [E, M, N].
    Limits: split_item 2 or 3; ``group_list`` int64, one entry per group, at most 1024, reaching the grouped size; at
    least 2 entries where they are counts; inner axes below 65536. The list forms and quantisation are not simulated.
    """
    given = [name for name, value in unused.items() if value not in (None, 0)]
    require(not given, f"{NAME}: {', '.join(given)} is not simulated")
    require(len(x) == len(weight) == 1, f"{NAME}: only one x and one weight are simulated")
    require(group_type in (ROWS, REDUCED), f"{NAME}: group_type 0 and 2 are simulated, not {group_type}")
    require(split_item in (2, 3), f"{NAME}: split_item must be 2 or 3 for one tensor as result, but got {split_item}")
    left, right = x[0], weight[0]
    require_dtype(NAME, "x", left)
    require_same_dtype(NAME, x=left, weight=right)
    require_dims(NAME, "x", left, (2,))
    for name, tensor in {"x": left, "weight": right}.items():
        inner = tensor.shape[-2] if _is_transposed(tensor) else tensor.shape[-1]
        require(inner < INNER_LIMIT, f"{NAME}: the inner axis of {name} must be below {INNER_LIMIT}, but is {inner}")
    if group_type == ROWS:
        return [_groups_of_rows(left, right, _ends(group_list, group_list_type, left.shape[0]))]
    return [_groups_of_columns(left, right, _ends(group_list, group_list_type, left.shape[1]))]


def _groups_of_rows(x: Tensor, weight: Tensor, ends: list[int]) -> Tensor:
    require_dims(NAME, "weight", weight, (3,))
    require(not _is_transposed(x), f"{NAME}: x must not be transposed where its rows are grouped")
    require(len(ends) == weight.shape[0], f"{NAME}: {len(ends)} groups for {weight.shape[0]} weights")
    require(x.shape[1] == weight.shape[1], f"{NAME}: K is {x.shape[1]} in x and {weight.shape[1]} in weight")
    groups = zip([0, *ends], ends, weight.float(), strict=False)
    return torch.cat([x[start:end].float() @ matrix for start, end, matrix in groups]).to(x.dtype)


def _groups_of_columns(x: Tensor, weight: Tensor, ends: list[int]) -> Tensor:
    require_dims(NAME, "weight", weight, (2,))
    require(_is_transposed(x), f"{NAME}: x must be a transposed tensor where its columns are grouped")
    require(not _is_transposed(weight), f"{NAME}: weight must not be transposed where its rows are grouped")
    require(x.shape[1] == weight.shape[0], f"{NAME}: K is {x.shape[1]} in x and {weight.shape[0]} in weight")
    groups = zip([0, *ends], ends, strict=False)
    return torch.stack([x[:, start:end].float() @ weight[start:end].float() for start, end in groups]).to(x.dtype)


def _ends(group_list: Tensor | None, group_list_type: int, size: int) -> list[int]:
    """Where each group ends."""
    require(group_list is not None, f"{NAME}: group_list is required")
    require_dtype(NAME, "group_list", group_list, (torch.int64,))
    require_dims(NAME, "group_list", group_list, (1,))
    require(group_list_type in (CUMULATIVE, COUNTS), f"{NAME}: group_list_type is 0 or 1, but got {group_list_type}")
    require(group_list.numel() <= MOST_GROUPS, f"{NAME}: at most {MOST_GROUPS} groups, but got {group_list.numel()}")
    ends = group_list if group_list_type == CUMULATIVE else group_list.cumsum(0)
    if group_list_type == COUNTS:
        require(group_list.numel() > 1, f"{NAME}: a group_list of counts must have more than one entry")
    starts = torch.nn.functional.pad(ends, (1, 0))[:-1]
    require(bool((ends >= starts).all()), f"{NAME}: group_list has a negative group: {group_list.tolist()}")
    require(int(ends[-1]) == size, f"{NAME}: group_list reaches {int(ends[-1])}, but the grouped axis has {size}")
    return ends.tolist()


def _is_transposed(tensor: Tensor) -> bool:
    """Whether the last two axes lie in memory the other way round."""
    return tensor.stride(-2) == 1 and tensor.stride(-1) >= tensor.shape[-2] and tensor.shape[-1] > 1


def _shapes(x: list[Tensor], weight: list[Tensor], *, group_type: int, group_list: Tensor, **_: Any) -> list[Tensor]:
    groups = group_list.shape if group_type == REDUCED else ()
    return [x[0].new_empty(*groups, x[0].shape[0], weight[0].shape[-1])]


KERNELS = {"npu_grouped_matmul": npu_grouped_matmul}
META = {"npu_grouped_matmul": _shapes}
AUTOGRAD: dict[str, Any] = {}
