"""Groups that fit the registers of one program: each pass reads every input once."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from veomni_ops.sizes import ceil_div, power_of_two
from veomni_ops.triton_gpus import multiprocessors, register_limit
from veomni_ops.triton_launches import triton_kernel
from veomni_triton.aligned_rows import alignment
from veomni_triton.partial_sums import sum_partials
from veomni_triton.rms_norm_gated.arithmetic import input_gradients, opened, result_of, source_of, weighted_gradient
from veomni_triton.rms_norm_gated.form import Form
from veomni_triton.root_mean_square import gain, reciprocal_rms
from veomni_triton.row_launches import BackwardLaunch, ForwardLaunch


def forward(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    y: Tensor,
    reciprocal: Tensor,
    eps: float,
    form: Form,
    launch: ForwardLaunch,
) -> None:
    """Write the gated norm of the rows of ``x`` into ``y``, and ``1 / rms`` of each group into ``reciprocal``.

    Args:
        x: ``[T, H]``, from :func:`aligned_rows`.
        gate: ``[T, H]``, likewise.
        weight: ``[H]``.
        y: ``T * H`` contiguous elements, written.
        reciprocal: ``[T, G]``, contiguous float32, written. It says how many groups a row has.
        eps: Added to the mean square.
        form: The variant's.
        launch: Rows per program, and its warps.
    """
    rows, groups = reciprocal.shape
    width = x.shape[1] // groups
    x_aligned, gate_aligned = alignment(width, x.element_size()), alignment(width, gate.element_size())
    _forward_kernel[(ceil_div(rows, launch.rows) * groups,)](
        x,
        gate,
        weight,
        y,
        reciprocal,
        rows,
        x.stride(0) // x_aligned,
        gate.stride(0) // gate_aligned,
        eps,
        GROUPS=groups,
        WIDTH=width,
        BLOCK=power_of_two(width),
        ROWS=launch.rows,
        X_ALIGNED=x_aligned,
        GATE_ALIGNED=gate_aligned,
        GATE_FIRST=form.gate_first,
        SIGMOID=form.sigmoid,
        ROUNDED=form.rounded,
        num_warps=launch.warps,
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
    launch: BackwardLaunch,
) -> None:
    """Write the gradients of ``x`` and the gate, and the weight's unless ``dweight`` is ``None``.

    Args:
        dy: ``[T, H]``, from :func:`aligned_rows`.
        x: ``[T, H]``, likewise.
        gate: ``[T, H]``, likewise.
        weight: ``[H]``.
        reciprocal: ``[T, G]``, float32, as forward wrote it.
        form: The variant's.
        dx: ``T * H`` contiguous elements, written.
        dgate: ``T * H`` contiguous elements, written.
        dweight: ``[H]``, written.
        launch: Rows per tile, warps, programs per multiprocessor and stages.
    """
    rows, groups = reciprocal.shape
    width = x.shape[1] // groups
    # Persistent programs, each with one group, so that the weight's gradient has one partial sum per program.
    programs = min(ceil_div(rows, launch.rows), max(1, multiprocessors(x.device) * launch.programs // groups))
    partials = None if dweight is None else x.new_empty(programs, x.shape[1], dtype=torch.float32)
    aligned = [alignment(width, tensor.element_size()) for tensor in (dy, x, gate)]
    _backward_kernel[(programs * groups,)](
        dy,
        x,
        gate,
        weight,
        reciprocal,
        dx,
        dgate,
        partials,
        rows,
        dy.stride(0) // aligned[0],
        x.stride(0) // aligned[1],
        gate.stride(0) // aligned[2],
        GROUPS=groups,
        WIDTH=width,
        BLOCK=power_of_two(width),
        ROWS=launch.rows,
        DY_ALIGNED=aligned[0],
        X_ALIGNED=aligned[1],
        GATE_ALIGNED=aligned[2],
        GATE_FIRST=form.gate_first,
        SIGMOID=form.sigmoid,
        STAGES=launch.stages,
        num_warps=launch.warps,
        **register_limit(x.device, launch.registers),
    )
    if dweight is not None and partials is not None:
        sum_partials(partials, dweight)


# T rows of G = GROUPS groups of WIDTH columns; H = G * WIDTH. BLOCK is WIDTH padded to a power of two. A program has
# one group, and a tile is [ROWS, BLOCK]: that group of neighbouring rows. Neighbours in the grid have neighbouring
# groups.
#
# Strides come in units of the alignment that the width guarantees, and are not specialised: where 16 happens to divide
# them, Triton would compile wider vector loads, and so another order of summation.
@triton_kernel(do_not_specialize=["rows", "x_stride", "gate_stride", "eps"])
def _forward_kernel(
    x,  # [T, H], rows x_stride * X_ALIGNED apart
    gate,  # [T, H], rows gate_stride * GATE_ALIGNED apart
    weight,  # [H]
    y,  # [T, H], contiguous, written
    reciprocal,  # [T, G], float32, written
    rows,  # T
    x_stride,  # in units of X_ALIGNED elements
    gate_stride,  # in units of GATE_ALIGNED elements
    eps,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    X_ALIGNED: tl.constexpr,
    GATE_ALIGNED: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    SIGMOID: tl.constexpr,
    ROUNDED: tl.constexpr,
):
    group = tl.program_id(0) % GROUPS
    # int64, since T * H can exceed 2**31.
    row = (tl.program_id(0) // GROUPS * ROWS + tl.arange(0, ROWS)).to(tl.int64)  # [ROWS]
    column = tl.arange(0, BLOCK)  # [BLOCK], in the group
    start = group * WIDTH
    # [ROWS, BLOCK], as all below but scale. Masked elements are zeros, which the sum of squares doesn't see.
    inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
    values = tl.load(x + start + (row * x_stride * X_ALIGNED)[:, None] + column[None, :], mask=inside, other=0.0)
    gates = tl.load(
        gate + start + (row * gate_stride * GATE_ALIGNED)[:, None] + column[None, :], mask=inside, other=0.0
    )
    opening = opened(gates, SIGMOID)[0]
    source = source_of(values, opening, GATE_FIRST)
    scale = reciprocal_rms(tl.sum(source * source, axis=1), eps, WIDTH)  # [ROWS]
    tl.store(reciprocal + row * GROUPS + group, scale, mask=row < rows)
    factor = gain(weight + start, column, 0.0, WIDTH)[None, :]
    result = result_of(
        source, scale[:, None], factor, opening, values.dtype, weight.dtype.element_ty, GATE_FIRST, ROUNDED
    )
    at = y + start + row[:, None] * (GROUPS * WIDTH) + column[None, :]
    tl.store(at, result.to(y.dtype.element_ty), mask=inside)


@triton_kernel(do_not_specialize=["rows", "dy_stride", "x_stride", "gate_stride"])
def _backward_kernel(
    dy,  # [T, H], rows dy_stride * DY_ALIGNED apart
    x,  # [T, H], rows x_stride * X_ALIGNED apart
    gate,  # [T, H], rows gate_stride * GATE_ALIGNED apart
    weight,  # [H]
    reciprocal,  # [T, G], float32
    dx,  # [T, H], contiguous, written
    dgate,  # [T, H], contiguous, written
    partials,  # [programs, H], float32, written; None if the weight's gradient isn't needed
    rows,  # T
    dy_stride,  # in units of DY_ALIGNED elements, and so on: dtypes may differ
    x_stride,
    gate_stride,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    DY_ALIGNED: tl.constexpr,
    X_ALIGNED: tl.constexpr,
    GATE_ALIGNED: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    SIGMOID: tl.constexpr,
    STAGES: tl.constexpr,
):
    group, program = tl.program_id(0) % GROUPS, tl.program_id(0) // GROUPS
    column = tl.arange(0, BLOCK)  # [BLOCK], in the group
    start = group * WIDTH
    factor = gain(weight + start, column, 0.0, WIDTH)[None, :]  # [1, BLOCK], loaded once for all tiles
    # Summed over rows after the loop: within it, elements stay in their thread.
    dweight = tl.zeros((ROWS, BLOCK), tl.float32)
    # A program takes every programs-th tile, so the grid alone decides which rows a partial sum is of.
    for tile in tl.range(program, tl.cdiv(rows, ROWS), tl.num_programs(0) // GROUPS, num_stages=STAGES):
        row = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)  # [ROWS]
        inside = (row < rows)[:, None] & (column < WIDTH)[None, :]  # [ROWS, BLOCK], as below but scale, projection
        dy_at = dy + start + (row * dy_stride * DY_ALIGNED)[:, None] + column[None, :]
        x_at = x + start + (row * x_stride * X_ALIGNED)[:, None] + column[None, :]
        gate_at = gate + start + (row * gate_stride * GATE_ALIGNED)[:, None] + column[None, :]
        upstream = tl.load(dy_at, mask=inside, other=0.0).to(tl.float32)
        values = tl.load(x_at, mask=inside, other=0.0).to(tl.float32)
        opening, slope = opened(tl.load(gate_at, mask=inside, other=0.0), SIGMOID)
        scale = tl.load(reciprocal + row * GROUPS + group, mask=row < rows, other=0.0)[:, None]  # [ROWS, 1]
        normal = source_of(values, opening, GATE_FIRST) * scale
        products = weighted_gradient(upstream, opening, GATE_FIRST) * normal
        projection = tl.sum(products * factor, axis=1)[:, None] / WIDTH  # [ROWS, 1]
        dweight += products
        gradients = input_gradients(upstream, values, normal, scale, factor, opening, slope, projection, GATE_FIRST)
        at = start + row[:, None] * (GROUPS * WIDTH) + column[None, :]
        tl.store(dx + at, gradients[0].to(dx.dtype.element_ty), mask=inside)
        tl.store(dgate + at, gradients[1].to(dgate.dtype.element_ty), mask=inside)
    if partials is not None:
        total = tl.sum(dweight, axis=0)  # [BLOCK]
        # A row of its own for each program, added up by another kernel: atomics would add in a random order.
        tl.store(partials + program.to(tl.int64) * (GROUPS * WIDTH) + start + column, total, mask=column < WIDTH)
