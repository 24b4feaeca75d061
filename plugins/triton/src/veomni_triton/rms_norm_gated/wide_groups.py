"""Groups that no program can hold: each is read in pieces, twice, the second time out of the L2 cache."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from veomni_ops.sizes import ceil_div
from veomni_ops.triton_gpus import multiprocessors
from veomni_ops.triton_launches import triton_kernel
from veomni_triton.aligned_rows import alignment
from veomni_triton.partial_sums import sum_partials
from veomni_triton.rms_norm_gated.arithmetic import input_gradients, opened, result_of, source_of, weighted_gradient
from veomni_triton.rms_norm_gated.form import Form
from veomni_triton.root_mean_square import gain, reciprocal_rms

PIECE = 4096  # 16 elements for each thread of 8 warps: two vector loads in bfloat16
WARPS = 8
# The weight's gradient is a sum per column and needs no whole groups: smaller pieces make more programs.
COLUMNS = 1024  # 8 elements for each thread of 4 warps: one vector load in bfloat16
COLUMN_WARPS = 4
PROGRAMS = 8  # per multiprocessor, for the weight's gradient


def forward(x: Tensor, gate: Tensor, weight: Tensor, y: Tensor, reciprocal: Tensor, eps: float, form: Form) -> None:
    """As :func:`whole_groups.forward`, for groups of any size."""
    rows, groups = reciprocal.shape
    width = x.shape[1] // groups
    x_aligned, gate_aligned = alignment(width, x.element_size()), alignment(width, gate.element_size())
    _forward_kernel[(rows * groups,)](
        x,
        gate,
        weight,
        y,
        reciprocal,
        x.stride(0) // x_aligned,
        gate.stride(0) // gate_aligned,
        eps,
        GROUPS=groups,
        WIDTH=width,
        PIECE=PIECE,
        X_ALIGNED=x_aligned,
        GATE_ALIGNED=gate_aligned,
        GATE_FIRST=form.gate_first,
        SIGMOID=form.sigmoid,
        ROUNDED=form.rounded,
        num_warps=WARPS,
    )


def backward(
    dy: Tensor,
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    reciprocal: Tensor,
    form: Form,
    dx: Tensor,
    dgate: Tensor,
    dweight: Tensor | None,
) -> None:
    """As :func:`whole_groups.backward`, for groups of any size; reads the inputs again for the weight's gradient."""
    rows, groups = reciprocal.shape
    width = x.shape[1] // groups
    aligned = [alignment(width, tensor.element_size()) for tensor in (dy, x, gate)]
    strides = [tensor.stride(0) // unit for tensor, unit in zip((dy, x, gate), aligned, strict=True)]
    shape = {"GROUPS": groups, "WIDTH": width, "GATE_FIRST": form.gate_first, "SIGMOID": form.sigmoid}
    shape |= dict(zip(("DY_ALIGNED", "X_ALIGNED", "GATE_ALIGNED"), aligned, strict=True))
    _input_gradients_kernel[(rows * groups,)](
        dy, x, gate, weight, reciprocal, dx, dgate, *strides, **shape, PIECE=PIECE, num_warps=WARPS
    )
    if dweight is None:
        return
    pieces = groups * ceil_div(width, COLUMNS)
    # PROGRAMS per multiprocessor in all, divided over the pieces of columns: each leaves a row of partial sums.
    programs = min(rows, ceil_div(multiprocessors(x.device) * PROGRAMS, pieces))
    partials = x.new_empty(programs, groups * width, dtype=torch.float32)
    _weight_gradient_kernel[(programs, pieces)](
        dy, x, gate, reciprocal, partials, rows, *strides, **shape, COLUMNS=COLUMNS, num_warps=COLUMN_WARPS
    )
    sum_partials(partials, dweight)


# T rows of G = GROUPS groups of WIDTH columns; H = G * WIDTH. A program has one group, and [PIECE] of it at a time: so
# are blocks in loops over a group. Strides are not specialised and come in units of the alignment, see whole_groups.
@triton_kernel(do_not_specialize=["x_stride", "gate_stride", "eps"])
def _forward_kernel(
    x,  # [T, H], rows x_stride * X_ALIGNED apart
    gate,  # [T, H], rows gate_stride * GATE_ALIGNED apart
    weight,  # [H]
    y,  # [T, H], contiguous, written
    reciprocal,  # [T, G], float32, written
    x_stride,  # in units of X_ALIGNED elements
    gate_stride,  # in units of GATE_ALIGNED elements
    eps,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    PIECE: tl.constexpr,
    X_ALIGNED: tl.constexpr,
    GATE_ALIGNED: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    SIGMOID: tl.constexpr,
    ROUNDED: tl.constexpr,
):
    row, start = (tl.program_id(0) // GROUPS).to(tl.int64), tl.program_id(0) % GROUPS * WIDTH  # T * H can exceed 2**31
    x += row * x_stride * X_ALIGNED + start
    gate += row * gate_stride * GATE_ALIGNED + start
    # Added elementwise over the pieces, and across the piece once at the end: one reduction between threads per group.
    squares = tl.zeros((PIECE,), tl.float32)  # [PIECE]
    for first in range(0, WIDTH, PIECE):
        column = first + tl.arange(0, PIECE)
        opening = opened(tl.load(gate + column, mask=column < WIDTH, other=0.0), SIGMOID)[0]
        source = source_of(tl.load(x + column, mask=column < WIDTH, other=0.0), opening, GATE_FIRST)
        squares += source * source
    scale = reciprocal_rms(tl.sum(squares, axis=0), eps, WIDTH)
    tl.store(reciprocal + tl.program_id(0), scale)
    # The group is read again rather than kept: it is wider than the registers.
    for first in range(0, WIDTH, PIECE):
        column = first + tl.arange(0, PIECE)
        opening = opened(tl.load(gate + column, mask=column < WIDTH, other=0.0), SIGMOID)[0]
        values = tl.load(x + column, mask=column < WIDTH, other=0.0)
        source = source_of(values, opening, GATE_FIRST)
        factor = gain(weight + start, column, 0.0, WIDTH)
        result = result_of(source, scale, factor, opening, values.dtype, weight.dtype.element_ty, GATE_FIRST, ROUNDED)
        at = y + row * (GROUPS * WIDTH) + start + column
        tl.store(at, result.to(y.dtype.element_ty), mask=column < WIDTH)


@triton_kernel(do_not_specialize=["dy_stride", "x_stride", "gate_stride"])
def _input_gradients_kernel(
    dy,  # [T, H], rows dy_stride * DY_ALIGNED apart
    x,  # [T, H], rows x_stride * X_ALIGNED apart
    gate,  # [T, H], rows gate_stride * GATE_ALIGNED apart
    weight,  # [H]
    reciprocal,  # [T, G], float32
    dx,  # [T, H], contiguous, written
    dgate,  # [T, H], contiguous, written
    dy_stride,  # in units of DY_ALIGNED elements, and so on
    x_stride,
    gate_stride,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    SIGMOID: tl.constexpr,
    DY_ALIGNED: tl.constexpr,
    X_ALIGNED: tl.constexpr,
    GATE_ALIGNED: tl.constexpr,
    PIECE: tl.constexpr,
):
    row, start = (tl.program_id(0) // GROUPS).to(tl.int64), tl.program_id(0) % GROUPS * WIDTH
    dy += row * dy_stride * DY_ALIGNED + start
    x += row * x_stride * X_ALIGNED + start
    gate += row * gate_stride * GATE_ALIGNED + start
    scale = tl.load(reciprocal + tl.program_id(0))
    # The first pass over the group is for the mean, see input_gradients.
    products = tl.zeros((PIECE,), tl.float32)  # [PIECE], summed as forward's squares
    for first in range(0, WIDTH, PIECE):
        column = first + tl.arange(0, PIECE)
        opening = opened(tl.load(gate + column, mask=column < WIDTH, other=0.0), SIGMOID)[0]
        normal = source_of(tl.load(x + column, mask=column < WIDTH, other=0.0), opening, GATE_FIRST) * scale
        upstream = tl.load(dy + column, mask=column < WIDTH, other=0.0).to(tl.float32)
        dnormal = weighted_gradient(upstream, opening, GATE_FIRST) * gain(weight + start, column, 0.0, WIDTH)
        products += dnormal * normal
    projection = tl.sum(products, axis=0) / WIDTH
    for first in range(0, WIDTH, PIECE):
        column = first + tl.arange(0, PIECE)
        opening, slope = opened(tl.load(gate + column, mask=column < WIDTH, other=0.0), SIGMOID)
        values = tl.load(x + column, mask=column < WIDTH, other=0.0).to(tl.float32)
        normal = source_of(values, opening, GATE_FIRST) * scale
        upstream = tl.load(dy + column, mask=column < WIDTH, other=0.0).to(tl.float32)
        factor = gain(weight + start, column, 0.0, WIDTH)
        gradients = input_gradients(upstream, values, normal, scale, factor, opening, slope, projection, GATE_FIRST)
        at = row * (GROUPS * WIDTH) + start + column
        tl.store(dx + at, gradients[0].to(dx.dtype.element_ty), mask=column < WIDTH)
        tl.store(dgate + at, gradients[1].to(dgate.dtype.element_ty), mask=column < WIDTH)


@triton_kernel(do_not_specialize=["rows", "dy_stride", "x_stride", "gate_stride"])
def _weight_gradient_kernel(
    dy,  # [T, H], rows dy_stride * DY_ALIGNED apart
    x,  # [T, H], rows x_stride * X_ALIGNED apart
    gate,  # [T, H], rows gate_stride * GATE_ALIGNED apart
    reciprocal,  # [T, G], float32
    partials,  # [programs, H], float32, written
    rows,  # T
    dy_stride,  # in units of DY_ALIGNED elements, and so on
    x_stride,
    gate_stride,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    SIGMOID: tl.constexpr,
    DY_ALIGNED: tl.constexpr,
    X_ALIGNED: tl.constexpr,
    GATE_ALIGNED: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    program, group, piece = tl.program_id(0), tl.program_id(1) % GROUPS, tl.program_id(1) // GROUPS
    column = piece * COLUMNS + tl.arange(0, COLUMNS)  # [COLUMNS], in the group, as all blocks below
    inside, column = column < WIDTH, group * WIDTH + column
    # Every num_programs-th row, one at a time and in order: the grid alone decides the order of the sum.
    found = tl.zeros((COLUMNS,), tl.float32)
    for row in tl.range(program, rows, tl.num_programs(0), num_stages=3):
        row = tl.cast(row, tl.int64)  # a loop variable is int32, and T * H can exceed 2**31
        upstream = tl.load(dy + row * dy_stride * DY_ALIGNED + column, mask=inside, other=0.0).to(tl.float32)
        values = tl.load(x + row * x_stride * X_ALIGNED + column, mask=inside, other=0.0)
        gates = tl.load(gate + row * gate_stride * GATE_ALIGNED + column, mask=inside, other=0.0)
        opening = opened(gates, SIGMOID)[0]
        scale = tl.load(reciprocal + row * GROUPS + group)
        found += weighted_gradient(upstream, opening, GATE_FIRST) * (source_of(values, opening, GATE_FIRST) * scale)
    # A row of its own for each program, added up by another kernel: atomics would add in a random order.
    tl.store(partials + program.to(tl.int64) * (GROUPS * WIDTH) + column, found, mask=inside)
