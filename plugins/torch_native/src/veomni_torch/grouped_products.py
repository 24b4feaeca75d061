"""Grouped GEMMs: consecutive groups of rows, each multiplied by its own matrix; and a bias for each group.

``ends[E]``, int32, is the end row of each group; there may be further rows after the last group. With bf16 on CUDA from
SM80 on, one call multiplies all groups (``torch.nn.functional.grouped_mm``); elsewhere, each group is one ``torch.mm``.

Shapes: N rows, E groups (experts), A columns of the left operand, B columns of the right one.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, library
from torch.nn import functional as F

from veomni_core.kernels import aligned, first_derivatives_only, is_aligned
from veomni_torch.fixed_order import linear


def _has_grouped_mm(rows: Tensor) -> bool:
    return (
        rows.is_cuda
        and rows.dtype == torch.bfloat16
        and torch.cuda.get_device_capability(rows.device) >= (8, 0)
        and rows.shape[0] > 0
    )


def grouped_product(rows: Tensor, matrices: Tensor, ends: Tensor, in_fixed_order: bool = False) -> Tensor:
    """``[N, B]``: each group of ``rows[N, A]`` times its matrix in ``matrices[E, A, B]``.

    Rows after the last group are uninitialised. ``in_fixed_order``, which is for CPUs, a row's bits don't depend on the
    others.
    """
    if _has_grouped_mm(rows):
        return _grouped_mm(aligned(rows), _taken(matrices), ends)
    product = rows.new_empty(rows.shape[0], matrices.shape[2])
    for number, group in _groups(ends):
        if in_fixed_order:
            product[group] = linear(rows[group], matrices[number].t())
        else:
            torch.mm(rows[group], matrices[number], out=product[group])
    return product


def add_grouped_product(total: Tensor, rows: Tensor, matrices: Tensor, ends: Tensor, factor: float = 1.0) -> Tensor:
    """Adds ``factor`` times :func:`grouped_product` to ``total[N, B]``, in place, and returns it.

    What it adds to rows after the last group is undefined.
    """
    if _has_grouped_mm(rows):
        return total.add_(_grouped_mm(aligned(rows), _taken(matrices), ends), alpha=factor)
    for number, group in _groups(ends):
        torch.addmm(total[group], rows[group], matrices[number], alpha=factor, out=total[group])
    return total


def grouped_outer(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """``[E, A, B]``: per group, ``left[N, A]`` transposed times ``right[N, B]``; zeros for an empty group."""
    if _has_grouped_mm(left):
        return _grouped_mm(aligned(left).t(), aligned(right), ends)
    product = left.new_zeros(ends.shape[0], left.shape[1], right.shape[1])
    for number, group in _groups(ends):
        torch.mm(left[group].t(), right[group], out=product[number])
    return product


def _grouped_mm(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """``F.grouped_mm``, made contiguous: it pads the rows of a result whose width is no multiple of 16 bytes.

    What has a dimension of N lies row by row, so that a group may begin at any row. Column by column, each group would
    have to begin at a multiple of 16 bytes, which the GPU asserts when it is too late to say so.
    """
    return F.grouped_mm(left, right, offs=ends).contiguous()


def _taken(matrices: Tensor) -> Tensor:
    """``matrices[E, A, B]``, or an aligned copy if ``F.grouped_mm`` takes them neither row-major nor column-major."""
    return matrices if is_aligned(matrices) or is_aligned(matrices.mT) else aligned(matrices)


def _groups(ends: Tensor) -> list[tuple[int, slice]]:
    """The index and row slice of every group that isn't empty; reads ``ends`` on the host."""
    stops = ends.tolist()
    starts = [0, *stops[:-1]]
    return [(g, slice(a, b)) for g, (a, b) in enumerate(zip(starts, stops, strict=True)) if b > a]


@library.custom_op("veomni_torch::grouped_linear", mutates_args=())
def grouped_linear(rows: Tensor, weight: Tensor, ends: Tensor, in_fixed_order: bool = False) -> Tensor:
    """Differentiable :func:`grouped_product` with transposed weights: ``rows[N, A] @ weight[E, B, A].mT``, ``[N, B]``.

    Gradients reach ``rows`` and ``weight``; they are zero for rows after the last group, and for the weight of an empty
    group. Those that aren't needed aren't computed.
    """
    return grouped_product(rows, weight.transpose(1, 2), ends, in_fixed_order)


@grouped_linear.register_fake
def _(rows: Tensor, weight: Tensor, ends: Tensor, in_fixed_order: bool = False) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[1])


@library.custom_op("veomni_torch::grouped_linear_backward", mutates_args=())
def _grouped_linear_backward(
    dy: Tensor, rows: Tensor, weight: Tensor, ends: Tensor, of_rows: bool, of_weight: bool
) -> tuple[Tensor, Tensor]:
    """The gradients of rows and weight; one that isn't asked for has no elements."""
    drows = grouped_product(dy, weight, ends) if of_rows else dy.new_empty(0)
    return drows, grouped_outer(dy, rows, ends) if of_weight else dy.new_empty(0)


@_grouped_linear_backward.register_fake
def _(dy: Tensor, rows: Tensor, weight: Tensor, ends: Tensor, of_rows: bool, of_weight: bool) -> tuple[Tensor, Tensor]:
    drows = torch.empty_like(rows) if of_rows else dy.new_empty(0)
    dweight = torch.empty_like(weight, memory_format=torch.contiguous_format) if of_weight else dy.new_empty(0)
    return drows, dweight


def _save_linear(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])


@partial(first_derivatives_only, op="moe_experts")
def _linear_gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
    rows, weight, ends = ctx.saved_tensors
    of_rows, of_weight, *_ = ctx.needs_input_grad
    drows, dweight = _grouped_linear_backward(dy.contiguous(), rows, weight, ends, of_rows, of_weight)
    if of_rows:
        # grouped_product leaves the rows after the last group uninitialised; their gradient is zero.
        covered = (torch.arange(drows.shape[0], device=drows.device) < ends[-1]).unsqueeze(1)
        drows = torch.where(covered, drows, 0.0)
    return drows if of_rows else None, dweight if of_weight else None, None, None


grouped_linear.register_autograd(_linear_gradients, setup_context=_save_linear)


@library.custom_op("veomni_torch::grouped_bias", mutates_args=())
def grouped_bias(bias: Tensor, group: Tensor, ends: Tensor) -> Tensor:
    """``bias[E, B]`` of each row's ``group[N]``: ``[N, B]``. Its gradient leaves out rows after the last group.

    The gradient adds rows in order; that of ``F.embedding`` uses atomics on GPUs (2.11) if groups are few and large.
    """
    return bias[group]


@grouped_bias.register_fake
def _(bias: Tensor, group: Tensor, ends: Tensor) -> Tensor:
    return bias.new_empty(group.shape[0], bias.shape[1])


@library.custom_op("veomni_torch::grouped_sum", mutates_args=())
def _grouped_sum(rows: Tensor, ends: Tensor) -> Tensor:
    """The sum of each group of ``rows[N, B]``: ``[E, B]``; zeros for an empty one."""
    return torch.segment_reduce(rows, "sum", offsets=F.pad(ends.long(), (1, 0)), axis=0, unsafe=True, initial=0.0)


@_grouped_sum.register_fake
def _(rows: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(ends.shape[0], rows.shape[1])


def _save_ends(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[2])


@partial(first_derivatives_only, op="moe_experts")
def _bias_gradients(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
    return _grouped_sum(dy.contiguous(), *ctx.saved_tensors), None, None


grouped_bias.register_autograd(_bias_gradients, setup_context=_save_ends)
