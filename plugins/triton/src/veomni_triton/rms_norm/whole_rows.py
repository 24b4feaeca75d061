"""Rows that fit the registers of one program: forward reads ``x`` once, backward reads ``x`` and ``dy`` once."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from veomni_ops.sizes import ceil_div, power_of_two
from veomni_ops.triton_gpus import multiprocessors
from veomni_ops.triton_launches import triton_kernel
from veomni_triton.aligned_rows import alignment
from veomni_triton.partial_sums import sum_partials
from veomni_triton.root_mean_square import gain, normalised, reciprocal_rms
from veomni_triton.row_launches import BackwardLaunch, ForwardLaunch


def forward(
    x: Tensor,
    weight: Tensor | None,
    y: Tensor,
    reciprocal: Tensor,
    eps: float,
    offset: float,
    round_scale: bool,
    round_normalised: bool,
    launch: ForwardLaunch,
) -> None:
    """Write the normalised rows of ``x`` into ``y``, and ``1 / rms`` of each into ``reciprocal``.

    Args:
        x: ``[T, H]``, from :func:`aligned_rows`.
        weight: ``[H]`` or ``None``.
        y: ``T * H`` contiguous elements, written.
        reciprocal: ``T`` contiguous float32, written.
        eps: Added to the mean square.
        offset: Added to the weight.
        round_scale: Whether ``1 / rms`` is rounded to x's dtype before it is multiplied.
        round_normalised: Whether ``x / rms`` is rounded to x's dtype before the weight is.
        launch: Rows per program, and its warps.
    """
    rows, width = x.shape
    aligned = alignment(width, x.element_size())
    _forward_kernel[(ceil_div(rows, launch.rows),)](
        x,
        weight,
        y,
        reciprocal,
        rows,
        x.stride(0) // aligned,
        eps,
        WIDTH=width,
        BLOCK=power_of_two(width),
        ROWS=launch.rows,
        ALIGNED=aligned,
        OFFSET=offset,
        ROUND_SCALE=round_scale,
        ROUND_NORMALISED=round_normalised,
        num_warps=launch.warps,
    )


def backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    reciprocal: Tensor,
    offset: float,
    dx: Tensor,
    dweight: Tensor | None,
    launch: BackwardLaunch,
) -> None:
    """Write the gradient of ``x`` into ``dx``, and the weight's into ``dweight`` unless it is ``None``.

    Args:
        dy: ``[T, H]``, from :func:`aligned_rows`.
        x: ``[T, H]``, likewise.
        weight: ``[H]`` or ``None``.
        reciprocal: ``T`` float32 values, as forward wrote them.
        offset: Added to the weight.
        dx: ``T * H`` contiguous elements, written.
        dweight: ``[H]``, written.
        launch: Rows per tile, warps, programs per multiprocessor and stages.
    """
    rows, width = x.shape
    # Persistent programs, so that the weight's gradient has one partial sum per program, not one per tile.
    programs = min(ceil_div(rows, launch.rows), multiprocessors(x.device) * launch.programs)
    partials = None if dweight is None else x.new_empty(programs, width, dtype=torch.float32)
    dy_aligned, x_aligned = alignment(width, dy.element_size()), alignment(width, x.element_size())
    _backward_kernel[(programs,)](
        dy,
        x,
        weight,
        reciprocal,
        dx,
        partials,
        rows,
        dy.stride(0) // dy_aligned,
        x.stride(0) // x_aligned,
        WIDTH=width,
        BLOCK=power_of_two(width),
        ROWS=launch.rows,
        DY_ALIGNED=dy_aligned,
        X_ALIGNED=x_aligned,
        OFFSET=offset,
        STAGES=launch.stages,
        num_warps=launch.warps,
    )
    if dweight is not None and partials is not None:
        sum_partials(partials, dweight)


# T rows, H = WIDTH columns, BLOCK is H padded to a power of two. A tile is [ROWS, BLOCK]: whole rows.
#
# Strides come in units of the alignment that the width guarantees, and are not specialised: where 16 happens to divide
# them, Triton would compile wider vector loads, and so another order of summation. Multiplied by ALIGNED, a constant,
# they still let the compiler know as much alignment as every row of this width has.
@triton_kernel(do_not_specialize=["rows", "x_stride", "eps"])
def _forward_kernel(
    x,  # [T, H], rows x_stride * ALIGNED apart
    weight,  # [H] or None
    y,  # [T, H], contiguous, written
    reciprocal,  # [T], float32, written
    rows,  # T
    x_stride,  # in units of ALIGNED elements
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    ALIGNED: tl.constexpr,
    OFFSET: tl.constexpr,
    ROUND_SCALE: tl.constexpr,
    ROUND_NORMALISED: tl.constexpr,
):
    # int64, since T * H can exceed 2**31.
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)  # [ROWS]
    column = tl.arange(0, BLOCK)  # [BLOCK]
    # [ROWS, BLOCK], as values, wide and result. Masked elements are zeros, which the sum of squares doesn't see.
    inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
    values = tl.load(x + (row * x_stride * ALIGNED)[:, None] + column[None, :], mask=inside, other=0.0)
    wide = values.to(tl.float32)  # squares overflow float16 from 256 on
    scale = reciprocal_rms(tl.sum(wide * wide, axis=1), eps, WIDTH)  # [ROWS]
    tl.store(reciprocal + row, scale, mask=row < rows)
    # From `values`, not `wide`: their dtype is the one to round to.
    result = normalised(values, scale[:, None], ROUND_SCALE, ROUND_NORMALISED)
    result *= gain(weight, column, OFFSET, WIDTH)[None, :]
    tl.store(y + row[:, None] * WIDTH + column[None, :], result.to(y.dtype.element_ty), mask=inside)


@triton_kernel(do_not_specialize=["rows", "dy_stride", "x_stride"])
def _backward_kernel(
    dy,  # [T, H], rows dy_stride * DY_ALIGNED apart
    x,  # [T, H], rows x_stride * X_ALIGNED apart
    weight,  # [H] or None
    reciprocal,  # [T], float32
    dx,  # [T, H], contiguous, written
    partials,  # [programs, H], float32, written; None if the weight's gradient isn't needed
    rows,  # T
    dy_stride,  # in units of DY_ALIGNED elements, which is not X_ALIGNED where the dtypes differ
    x_stride,  # in units of X_ALIGNED elements
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    DY_ALIGNED: tl.constexpr,
    X_ALIGNED: tl.constexpr,
    OFFSET: tl.constexpr,
    STAGES: tl.constexpr,
):
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)  # [BLOCK]
    factor = gain(weight, column, OFFSET, WIDTH)[None, :]  # [1, BLOCK], loaded once for all tiles
    # Summed over rows after the loop: within it, elements stay in their thread. Without partials it is never read, and
    # the compiler drops it.
    dweight = tl.zeros((ROWS, BLOCK), tl.float32)  # [ROWS, BLOCK]
    # A program takes every num_programs-th tile, so the grid alone decides which rows a partial sum is of.
    for tile in tl.range(program, tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)  # [ROWS]
        inside = (row < rows)[:, None] & (column < WIDTH)[None, :]  # [ROWS, BLOCK], as all below but scale, projection
        dy_at = dy + (row * dy_stride * DY_ALIGNED)[:, None] + column[None, :]
        x_at = x + (row * x_stride * X_ALIGNED)[:, None] + column[None, :]
        upstream = tl.load(dy_at, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(reciprocal + row, mask=row < rows, other=0.0)[:, None]  # [ROWS, 1]
        # Not rounded even where forward rounds it: the derivative of a cast is the identity.
        normal = tl.load(x_at, mask=inside, other=0.0).to(tl.float32) * scale
        # With n = x / rms and g = dy * gain: dx = (g - n * mean(g * n)) / rms.
        dnormal = upstream * factor
        projection = tl.sum(dnormal * normal, axis=1)[:, None] / WIDTH  # [ROWS, 1]
        gradient = (dnormal - normal * projection) * scale
        tl.store(dx + row[:, None] * WIDTH + column[None, :], gradient.to(dx.dtype.element_ty), mask=inside)
        dweight += upstream * normal
    if partials is not None:
        total = tl.sum(dweight, axis=0)  # [BLOCK]
        # A row of its own for each program, added up by another kernel: atomics would add in a random order.
        tl.store(partials + program.to(tl.int64) * WIDTH + column, total, mask=column < WIDTH)
