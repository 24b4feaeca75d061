"""Rows that no program can hold: each is read in pieces, twice, the second time out of the L2 cache."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from veomni_ops.sizes import ceil_div
from veomni_ops.triton_gpus import multiprocessors
from veomni_ops.triton_launches import triton_kernel
from veomni_triton.aligned_rows import alignment
from veomni_triton.partial_sums import sum_partials
from veomni_triton.root_mean_square import gain, normalised, reciprocal_rms

PIECE = 4096  # 16 elements for each thread of 8 warps: two vector loads in bfloat16
WARPS = 8
# The weight's gradient is a sum per column and needs no whole rows: smaller pieces make more programs.
COLUMNS = 1024  # 8 elements for each thread of 4 warps: one vector load in bfloat16
COLUMN_WARPS = 4
PROGRAMS = 8  # per multiprocessor, for the weight's gradient


def forward(
    x: Tensor,
    weight: Tensor | None,
    y: Tensor,
    reciprocal: Tensor,
    eps: float,
    offset: float,
    round_scale: bool,
    round_normalised: bool,
) -> None:
    """As :func:`whole_rows.forward`, for rows of any width."""
    rows, width = x.shape
    aligned = alignment(width, x.element_size())
    _forward_kernel[(rows,)](
        x,
        weight,
        y,
        reciprocal,
        x.stride(0) // aligned,
        eps,
        WIDTH=width,
        PIECE=PIECE,
        ALIGNED=aligned,
        OFFSET=offset,
        ROUND_SCALE=round_scale,
        ROUND_NORMALISED=round_normalised,
        num_warps=WARPS,
    )


def backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    reciprocal: Tensor,
    offset: float,
    dx: Tensor,
    dweight: Tensor | None,
) -> None:
    """As :func:`whole_rows.backward`, for rows of any width; reads ``dy`` and ``x`` again for the weight's gradient."""
    rows, width = x.shape
    dy_aligned, x_aligned = alignment(width, dy.element_size()), alignment(width, x.element_size())
    strides = (dy.stride(0) // dy_aligned, x.stride(0) // x_aligned)
    shape = {"WIDTH": width, "DY_ALIGNED": dy_aligned, "X_ALIGNED": x_aligned}
    _input_gradient_kernel[(rows,)](
        dy, x, weight, reciprocal, dx, *strides, **shape, PIECE=PIECE, OFFSET=offset, num_warps=WARPS
    )
    if dweight is None:
        return
    columns = ceil_div(width, COLUMNS)
    # PROGRAMS per multiprocessor in all, divided over the pieces of columns: each leaves a row of partial sums.
    programs = min(rows, ceil_div(multiprocessors(x.device) * PROGRAMS, columns))
    partials = x.new_empty(programs, width, dtype=torch.float32)
    _weight_gradient_kernel[(programs, columns)](
        dy, x, reciprocal, partials, rows, *strides, **shape, COLUMNS=COLUMNS, num_warps=COLUMN_WARPS
    )
    sum_partials(partials, dweight)


# T rows, H = WIDTH columns. A program has one row, and [PIECE] of it at a time; blocks in loops over a row are [PIECE].
# Strides are not specialised and come in units of the alignment, see whole_rows.
@triton_kernel(do_not_specialize=["x_stride", "eps"])
def _forward_kernel(
    x,  # [T, H], rows x_stride * ALIGNED apart
    weight,  # [H] or None
    y,  # [T, H], contiguous, written
    reciprocal,  # [T], float32, written
    x_stride,  # in units of ALIGNED elements
    eps,
    WIDTH: tl.constexpr,
    PIECE: tl.constexpr,
    ALIGNED: tl.constexpr,
    OFFSET: tl.constexpr,
    ROUND_SCALE: tl.constexpr,
    ROUND_NORMALISED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)  # T * H can exceed 2**31
    start = x + row * x_stride * ALIGNED
    # Added elementwise over the pieces, and across the piece once at the end: one reduction between threads per row.
    squares = tl.zeros((PIECE,), tl.float32)  # [PIECE]
    for first in range(0, WIDTH, PIECE):
        column = first + tl.arange(0, PIECE)
        values = tl.load(start + column, mask=column < WIDTH, other=0.0).to(tl.float32)
        squares += values * values
    scale = reciprocal_rms(tl.sum(squares, axis=0), eps, WIDTH)
    tl.store(reciprocal + row, scale)
    # The row is read again rather than kept: it is wider than the registers.
    for first in range(0, WIDTH, PIECE):
        column = first + tl.arange(0, PIECE)
        values = tl.load(start + column, mask=column < WIDTH, other=0.0)
        result = normalised(values, scale, ROUND_SCALE, ROUND_NORMALISED) * gain(weight, column, OFFSET, WIDTH)
        tl.store(y + row * WIDTH + column, result.to(y.dtype.element_ty), mask=column < WIDTH)


@triton_kernel(do_not_specialize=["dy_stride", "x_stride"])
def _input_gradient_kernel(
    dy,  # [T, H], rows dy_stride * DY_ALIGNED apart
    x,  # [T, H], rows x_stride * X_ALIGNED apart
    weight,  # [H] or None
    reciprocal,  # [T], float32
    dx,  # [T, H], contiguous, written
    dy_stride,  # in units of DY_ALIGNED elements
    x_stride,  # in units of X_ALIGNED elements
    WIDTH: tl.constexpr,
    DY_ALIGNED: tl.constexpr,
    X_ALIGNED: tl.constexpr,
    PIECE: tl.constexpr,
    OFFSET: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    dy += row * dy_stride * DY_ALIGNED
    x += row * x_stride * X_ALIGNED
    scale = tl.load(reciprocal + row)
    # With n = x / rms and g = dy * gain: dx = (g - n * mean(g * n)) / rms. The first pass over the row is for the mean.
    products = tl.zeros((PIECE,), tl.float32)  # [PIECE], summed as forward's squares
    for first in range(0, WIDTH, PIECE):
        column = first + tl.arange(0, PIECE)
        normal = tl.load(x + column, mask=column < WIDTH, other=0.0).to(tl.float32) * scale
        upstream = tl.load(dy + column, mask=column < WIDTH, other=0.0).to(tl.float32)
        products += upstream * gain(weight, column, OFFSET, WIDTH) * normal
    projection = tl.sum(products, axis=0) / WIDTH
    for first in range(0, WIDTH, PIECE):
        column = first + tl.arange(0, PIECE)
        normal = tl.load(x + column, mask=column < WIDTH, other=0.0).to(tl.float32) * scale
        upstream = tl.load(dy + column, mask=column < WIDTH, other=0.0).to(tl.float32)
        gradient = (upstream * gain(weight, column, OFFSET, WIDTH) - normal * projection) * scale
        tl.store(dx + row * WIDTH + column, gradient.to(dx.dtype.element_ty), mask=column < WIDTH)


@triton_kernel(do_not_specialize=["rows", "dy_stride", "x_stride"])
def _weight_gradient_kernel(
    dy,  # [T, H], rows dy_stride * DY_ALIGNED apart
    x,  # [T, H], rows x_stride * X_ALIGNED apart
    reciprocal,  # [T], float32
    partials,  # [programs, H], float32, written
    rows,  # T
    dy_stride,  # in units of DY_ALIGNED elements
    x_stride,  # in units of X_ALIGNED elements
    WIDTH: tl.constexpr,
    DY_ALIGNED: tl.constexpr,
    X_ALIGNED: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    program = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)  # [COLUMNS], as all blocks below
    # Every num_programs-th row, one at a time and in order: the grid alone decides the order of the sum.
    found = tl.zeros((COLUMNS,), tl.float32)
    for row in tl.range(program, rows, tl.num_programs(0), num_stages=3):
        row = tl.cast(row, tl.int64)  # a loop variable is int32, and T * H can exceed 2**31
        values = tl.load(x + row * x_stride * X_ALIGNED + column, mask=column < WIDTH, other=0.0).to(tl.float32)
        upstream = tl.load(dy + row * dy_stride * DY_ALIGNED + column, mask=column < WIDTH, other=0.0).to(tl.float32)
        found += upstream * (values * tl.load(reciprocal + row))
    # A row of its own for each program, added up by another kernel: atomics would add in a random order.
    tl.store(partials + program.to(tl.int64) * WIDTH + column, found, mask=column < WIDTH)
