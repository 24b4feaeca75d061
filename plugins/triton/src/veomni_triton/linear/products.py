"""A product in tiles that each sum along the whole width.

Matrix units add 16 columns at a time to what they have, in tiles of any size. So few rows may have other tiles than
many, and tiles may be read by pointers or by descriptors.

Legend: ``N`` rows of width ``A``, ``B`` outputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from veomni_ops.sizes import ceil_div
from veomni_ops.triton_descriptors import described
from veomni_ops.triton_gpus import multiprocessors
from veomni_ops.triton_launches import triton_kernel
from veomni_triton.linear.launches import Launch, launch_for


def product(
    rows: Tensor, weight: Tensor, bias: Tensor | None, result: Tensor | None = None, launch: Launch | None = None
) -> Tensor:
    """``rows[N, A] @ weight[B, A].T + bias[B]``, ``[N, B]``.

    Args:
        rows: with any strides.
        weight: with any strides.
        bias: or none.
        result: contiguous, to be written; a new one without it.
        launch: the tiles; without it those for these sizes.
    """
    (count, width), outputs = rows.shape, len(weight)
    bias = None if bias is None else bias.contiguous()
    result = rows.new_empty(count, outputs) if result is None else result
    if not result.numel():
        return result
    launch = launch_for(rows, weight, result) if launch is None else launch
    tiles = ceil_div(count, launch.rows) * ceil_div(outputs, launch.columns)
    sizes = {"ROWS": launch.rows, "COLUMNS": launch.columns, "STEP": launch.step}
    options = {"num_warps": launch.warps, "num_stages": launch.stages}
    with torch.cuda.device_of(rows):
        if launch.described:
            _described_product[min(tiles, multiprocessors(rows.device)),](
                described(rows, (launch.rows, launch.step)),
                described(weight, (launch.columns, launch.step)),
                described(result, (launch.rows, launch.columns // 2)),
                bias,
                count,
                outputs,
                width,
                **sizes,
                **options,
            )
        else:
            strides = (*rows.stride(), *weight.stride())
            _product[tiles,](rows, weight, bias, result, count, outputs, width, *strides, **sizes, **options)
    return result


@triton.jit
def _tile_place(tile, count, outputs, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The first row and column of a tile.

    Eight tiles of rows take turns, so that those which run together share weights in the cache.
    """
    row_tiles, column_tiles = tl.cdiv(count, ROWS), tl.cdiv(outputs, COLUMNS)
    row_tile, column_tile = tl.swizzle2d(tile // column_tiles, tile % column_tiles, row_tiles, column_tiles, 8)
    return row_tile * ROWS, column_tile * COLUMNS


# The number of rows is the batch's: specialised, it would compile the kernels anew.
@triton_kernel(do_not_specialize=["count"])
def _described_product(
    rows,  # described [N, A]
    weight,  # described [B, A]
    result,  # described [N, B]; written
    bias,  # [B] or None
    count,  # N
    outputs,  # B
    width,  # A
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
):
    HALF: tl.constexpr = COLUMNS // 2
    tiles = tl.cdiv(count, ROWS) * tl.cdiv(outputs, COLUMNS)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        row, column = _tile_place(tile, count, outputs, ROWS, COLUMNS)
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for k in range(0, width, STEP):
            total = tl.dot(rows.load([row, k]), weight.load([column, k]).T, total)
        if bias is not None:
            place = column + tl.arange(0, COLUMNS)
            total += tl.load(bias + place, mask=place < outputs, other=0.0)[None, :].to(tl.float32)
        # Halves take half of the shared memory, which the next tile's operands have.
        left, right = tl.split(tl.permute(tl.reshape(total, (ROWS, 2, HALF)), (0, 2, 1)))
        result.store([row, column], left.to(result.dtype))
        result.store([row, column + HALF], right.to(result.dtype))


@triton_kernel(do_not_specialize=["count"])
def _product(
    rows,  # [N, A]
    weight,  # [B, A]
    bias,  # [B] or None
    result,  # [N, B], contiguous; written
    count,  # N
    outputs,  # B
    width,  # A
    row_stride,
    row_step,
    weight_stride,
    weight_step,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
):
    first_row, first_column = _tile_place(tl.program_id(0), count, outputs, ROWS, COLUMNS)
    row = first_row + tl.arange(0, ROWS).to(tl.int64)  # [ROWS]
    column = first_column + tl.arange(0, COLUMNS).to(tl.int64)  # [COLUMNS]
    ks = tl.arange(0, STEP)  # [STEP]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for k in range(0, width, STEP):
        inside = ks + k < width
        x = tl.load(
            rows + row[:, None] * row_stride + (ks + k)[None, :] * row_step,
            mask=(row < count)[:, None] & inside[None, :],
            other=0.0,
        )
        w = tl.load(
            weight + column[None, :] * weight_stride + (ks + k)[:, None] * weight_step,
            mask=(column < outputs)[None, :] & inside[:, None],
            other=0.0,
        )
        # ieee: float32 operands are multiplied exactly, not as TF32.
        total = tl.dot(x, w, total, input_precision="ieee")
    if bias is not None:
        total += tl.load(bias + column, mask=column < outputs, other=0.0)[None, :].to(tl.float32)
    tl.store(
        result + row[:, None] * outputs + column[None, :],
        total.to(result.dtype.element_ty),
        mask=(row < count)[:, None] & (column < outputs)[None, :],
    )
