"""Rows that fit the registers of one program: ``x`` is read once in forward, ``x`` and ``dy`` once in backward."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from veomni_triton_moe.multiprocessors import multiprocessors
from veomni_triton_moe.rms_norm.arithmetic import gain, normalised, reciprocal_rms
from veomni_triton_moe.rms_norm.launch import BackwardLaunch, ForwardLaunch
from veomni_triton_moe.rms_norm.layout import alignment
from veomni_triton_moe.rms_norm.partial_sums import sum_partials


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
    """Write the normalised rows of ``x [T, H]`` into ``y``, and ``1 / rms`` of each into ``reciprocal``."""
    rows, width = x.shape
    aligned = alignment(width, x.element_size())
    _forward_kernel[(triton.cdiv(rows, launch.rows),)](
        x,
        weight,
        y,
        reciprocal,
        rows,
        x.stride(0) // aligned,
        eps,
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
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
    """Write the gradient of ``x [T, H]`` into ``dx``, and that of the weight into ``dweight`` where it is wanted."""
    rows, width = x.shape
    programs = min(triton.cdiv(rows, launch.rows), multiprocessors(x.device) * launch.programs)
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
        BLOCK=triton.next_power_of_2(width),
        ROWS=launch.rows,
        DY_ALIGNED=dy_aligned,
        X_ALIGNED=x_aligned,
        OFFSET=offset,
        STAGES=launch.stages,
        num_warps=launch.warps,
    )
    if dweight is not None and partials is not None:
        sum_partials(partials, dweight)


# Strides come in units of the alignment that the width guarantees, and are not specialised: triton would otherwise
# compile other vector widths, and so other orders of summation, for strides that 16 happens to divide.
@triton.jit(do_not_specialize=["rows", "x_stride", "eps"])
def _forward_kernel(
    x,
    weight,
    y,
    reciprocal,
    rows,
    x_stride,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    ALIGNED: tl.constexpr,
    OFFSET: tl.constexpr,
    ROUND_SCALE: tl.constexpr,
    ROUND_NORMALISED: tl.constexpr,
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
    values = tl.load(x + (row * x_stride * ALIGNED)[:, None] + column[None, :], mask=inside, other=0.0)
    wide = values.to(tl.float32)
    scale = reciprocal_rms(tl.sum(wide * wide, axis=1), eps, WIDTH)
    tl.store(reciprocal + row, scale, mask=row < rows)
    result = normalised(values, scale[:, None], ROUND_SCALE, ROUND_NORMALISED)
    result *= gain(weight, column, OFFSET, WIDTH)[None, :]
    tl.store(y + row[:, None] * WIDTH + column[None, :], result.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "dy_stride", "x_stride"])
def _backward_kernel(
    dy,
    x,
    weight,
    reciprocal,
    dx,
    partials,
    rows,
    dy_stride,
    x_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    DY_ALIGNED: tl.constexpr,
    X_ALIGNED: tl.constexpr,
    OFFSET: tl.constexpr,
    STAGES: tl.constexpr,
):
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    factor = gain(weight, column, OFFSET, WIDTH)[None, :]
    dweight = tl.zeros((ROWS, BLOCK), tl.float32)
    for tile in tl.range(program, tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
        dy_at = dy + (row * dy_stride * DY_ALIGNED)[:, None] + column[None, :]
        x_at = x + (row * x_stride * X_ALIGNED)[:, None] + column[None, :]
        upstream = tl.load(dy_at, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(reciprocal + row, mask=row < rows, other=0.0)[:, None]
        normal = tl.load(x_at, mask=inside, other=0.0).to(tl.float32) * scale
        dnormal = upstream * factor
        projection = tl.sum(dnormal * normal, axis=1)[:, None] / WIDTH
        gradient = (dnormal - normal * projection) * scale
        tl.store(dx + row[:, None] * WIDTH + column[None, :], gradient.to(dx.dtype.element_ty), mask=inside)
        dweight += upstream * normal
    if partials is not None:
        total = tl.sum(dweight, axis=0)
        tl.store(partials + program.to(tl.int64) * WIDTH + column, total, mask=column < WIDTH)
