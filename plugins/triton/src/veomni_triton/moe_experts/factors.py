"""An adapter's factors as the kernels read them: expert by expert.

In PEFT's memory ``b`` is ``[B, r, E]``: the experts alternate, so that the values of one expert's tile lie far apart,
and each product would gather them again. They are copied once, and the gradient is copied back to the factor's layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, library

from veomni_core.ops.first_derivatives import first_derivatives_only


def rank_block(rank: int) -> int:
    """Columns of inner that are multiplied at a time: a power of two of at least 16, as ``tl.dot`` wants it."""
    return min(max(triton.next_power_of_2(rank), 16), 64)


def padded_rank(rank: int) -> int:
    """``R``: the rank in whole blocks."""
    block = rank_block(rank)
    return triton.cdiv(rank, block) * block


def by_expert(b: Tensor) -> Tensor:
    """``b[E, B, r]`` of any strides as ``[E, B, R]``, contiguous, with zeros from column ``r`` on; may be ``b``."""
    if b.is_contiguous() and b.shape[2] == padded_rank(b.shape[2]):
        return b
    result: Tensor = _by_expert(b)
    return result


@library.custom_op("veomni_triton::moe_experts_factor", mutates_args=())
def _by_expert(b: Tensor) -> Tensor:
    result = b.new_empty(*b.shape[:2], padded_rank(b.shape[2]))
    _copied(b, result)
    return result


@_by_expert.register_fake
def _(b: Tensor) -> Tensor:
    return b.new_empty(*b.shape[:2], padded_rank(b.shape[2]))


@library.custom_op("veomni_triton::moe_experts_factor_backward", mutates_args=())
def _backward(dfactor: Tensor, rank: int, strides: Sequence[int]) -> Tensor:
    """The first ``rank`` columns of ``dfactor[E, B, R]``, in a tensor of these strides."""
    result = dfactor.new_empty_strided((*dfactor.shape[:2], rank), tuple(strides))
    _copied(dfactor, result)
    return result


@_backward.register_fake
def _(dfactor: Tensor, rank: int, strides: Sequence[int]) -> Tensor:
    return dfactor.new_empty_strided((*dfactor.shape[:2], rank), tuple(strides))


def _save(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    (b,) = inputs
    # As empty_like lays it out: b's own strides, unless it has gaps or overlaps.
    ctx.rank, ctx.strides = b.shape[2], torch.empty_like(b, device="meta").stride()


@first_derivatives_only
def _gradient(ctx: Any, dfactor: Tensor) -> Tensor:
    result: Tensor = _backward(dfactor, ctx.rank, ctx.strides)
    return result


_by_expert.register_autograd(_gradient, setup_context=_save)


def _copied(source: Tensor, target: Tensor) -> None:
    """Copy ``source[E, B, …]`` to ``target[E, B, …]``; what target has beyond source's columns becomes zeros."""
    experts, lines, columns = target.shape
    grid = (triton.cdiv(lines * columns, _PLACES), triton.cdiv(experts, _EXPERTS))
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
@triton.jit(do_not_specialize=["experts"])
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
