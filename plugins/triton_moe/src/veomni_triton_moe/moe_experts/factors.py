"""An adapter's factors as the kernels read them: expert by expert.

In PEFT's memory ``b`` is ``[B, r, E]``: the experts alternate, so that the values of one expert's tile lie far apart,
and each product would gather them again. They are copied once, and the gradient is copied back to the factor's layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from torch.autograd import Function

from veomni_core.kernels import first_derivatives_only
from veomni_ops.sizes import ceil_div, power_of_two
from veomni_ops.torch_operators import operator
from veomni_ops.triton_launches import triton_kernel


def rank_block(rank: int) -> int:
    """Columns of inner that are multiplied at a time: a power of two of at least 16, as ``tl.dot`` wants it."""
    return min(max(power_of_two(rank), 16), 64)


def padded_rank(rank: int) -> int:
    """``R``: the rank in whole blocks."""
    block = rank_block(rank)
    return ceil_div(rank, block) * block


def by_expert(b: Tensor) -> Tensor:
    """``b[E, B, r]`` of any strides as ``[E, B, R]``, contiguous, with zeros from column ``r`` on; may be ``b``."""
    if b.is_contiguous() and b.shape[2] == padded_rank(b.shape[2]):
        return b
    return _ByExpert.apply(b)  # type: ignore[no-any-return]


class _ByExpert(Function):
    @staticmethod
    def forward(ctx: Any, b: Tensor) -> Tensor:
        # As empty_like lays it out: b's own strides, unless it has gaps or overlaps.
        ctx.rank, ctx.strides = b.shape[2], torch.empty_like(b, device="meta").stride()
        return _padded(b)  # type: ignore[no-any-return]

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, dfactor: Tensor) -> Tensor:
        return _cut(dfactor, ctx.rank, ctx.strides)  # type: ignore[no-any-return]


def _padded_operator(b: Tensor) -> Tensor:
    result = _padded_fake(b)
    with torch.cuda.device_of(b):
        _copied(b, result)
    return result


def _padded_fake(b: Tensor) -> Tensor:
    return b.new_empty(*b.shape[:2], padded_rank(b.shape[2]))


def _cut_operator(dfactor: Tensor, rank: int, strides: Sequence[int]) -> Tensor:
    """The first ``rank`` columns of ``dfactor[E, B, R]``, in a tensor of these strides."""
    result = _cut_fake(dfactor, rank, strides)
    with torch.cuda.device_of(dfactor):
        _copied(dfactor, result)
    return result


def _cut_fake(dfactor: Tensor, rank: int, strides: Sequence[int]) -> Tensor:
    return dfactor.new_empty_strided((*dfactor.shape[:2], rank), tuple(strides))


_padded = operator("veomni_triton_moe::moe_experts_factor(Tensor b) -> Tensor", _padded_operator, _padded_fake)
_cut = operator(
    "veomni_triton_moe::moe_experts_factor_backward(Tensor dfactor, SymInt rank, SymInt[] strides) -> Tensor",
    _cut_operator,
    _cut_fake,
)


def _copied(source: Tensor, target: Tensor) -> None:
    """Copy ``source[E, B, …]`` to ``target[E, B, …]``; what target has beyond source's columns becomes zeros."""
    experts, lines, columns = target.shape
    grid = (ceil_div(lines * columns, _PLACES), ceil_div(experts, _EXPERTS))
    _copy[grid](
        source,
        target,
        experts,
        lines,
        *source.stride(),
        *target.stride(),
        SOURCE_COLUMNS=source.shape[2],
        COLUMNS=columns,
        EXPERTS=_EXPERTS,
        PLACES=_PLACES,
        num_warps=4,
    )


def with_last_contiguous(factor: Tensor) -> Tensor:
    """``factor[E, B, r]``, or where its last dimension is not contiguous, a copy ``[E, B, R]`` with zeros after it."""
    if factor.stride(2) == 1:
        return factor
    result = factor.new_empty(*factor.shape[:2], padded_rank(factor.shape[2]))
    _copied(factor, result)
    return result


_EXPERTS, _PLACES = 64, 64  # of one tile, which each side reads or writes along its own contiguous dimension


# E experts, B lines of each, r or R columns of each.
@triton_kernel(do_not_specialize=["experts"])
def _copy(
    source,  # [E, B, SOURCE_COLUMNS]
    target,  # [E, B, COLUMNS], written
    experts,  # E
    lines,  # B
    source_expert_stride,
    source_line_stride,
    source_column_stride,
    expert_stride,  # of target, as the next two
    line_stride,
    column_stride,
    SOURCE_COLUMNS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EXPERTS: tl.constexpr,
    PLACES: tl.constexpr,
):
    expert = (tl.program_id(1) * EXPERTS + tl.arange(0, EXPERTS))[None, :]  # [1, EXPERTS]
    place = (tl.program_id(0) * PLACES + tl.arange(0, PLACES))[:, None]  # [PLACES, 1], as the next two
    line, column = place // COLUMNS, place % COLUMNS
    mask = (line < lines) & (expert < experts)  # [PLACES, EXPERTS], as all below
    # int64, since E * B * R can exceed 2**31.
    at = expert.to(tl.int64) * source_expert_stride + line.to(tl.int64) * source_line_stride
    at += column * source_column_stride
    value = tl.load(source + at, mask=mask & (column < SOURCE_COLUMNS), other=0.0)
    at = expert.to(tl.int64) * expert_stride + line.to(tl.int64) * line_stride + column * column_stride
    tl.store(target + at, value, mask=mask)
