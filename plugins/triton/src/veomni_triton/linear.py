"""linear with tiles that each sum along the whole width, in one order: a row's bits don't depend on the batch.

Matrix units add 16 columns at a time to what they have, in tiles of any size; so few rows may have other tiles than
many. Backward is torch's products, which give the same bits in each run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function

from veomni_core.kernels import first_derivatives_only, product_operands, without_autocast
from veomni_ops.sizes import ceil_div
from veomni_ops.triton_gpus import gpu_of


@dataclass(frozen=True)
class Launch:
    """Rows and columns of a tile, the columns that it sums at a time, warps, and the depth of the loop's pipeline."""

    rows: int
    columns: int
    step: int
    warps: int
    stages: int


# From the largest on: the first of which every multiprocessor has a tile. `benchmarks/linear/triton_linear.py --tune`.
LAUNCHES = (
    Launch(128, 256, 64, 8, 3),
    Launch(128, 128, 64, 8, 4),
    Launch(64, 64, 128, 4, 3),
    Launch(64, 32, 128, 4, 4),
    Launch(64, 16, 128, 4, 4),
)
BYTES = 144 << 10  # of shared memory, which these take
SMALL = Launch(64, 64, 32, 4, 2)


def standard(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x[..., A] @ weight[B, A].T + bias[B]``, summed in float32 and rounded once; under autocast in its dtype.

    Raises:
        TypeError: x, weight and bias differ in dtype, and autocast is off.
    """
    x, weight, bias = product_operands("triton", x=x, weight=weight, bias=bias)
    return _Linear.apply(x, weight, bias)  # type: ignore[no-any-return]


class _Linear(Function):
    @staticmethod
    @without_autocast
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x.reshape(-1, x.shape[-1]), weight, bias).view(*x.shape[:-1], len(weight))

    @staticmethod
    @first_derivatives_only
    @without_autocast
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        rows = dy.reshape(-1, dy.shape[-1])
        dx = (rows @ weight).view(x.shape) if of_x else None
        dweight = rows.t() @ x.reshape(-1, x.shape[-1]) if of_weight else None
        return dx, dweight, rows.sum(0, dtype=torch.float32).to(dy.dtype) if of_bias else None


def product(rows: Tensor, weight: Tensor, bias: Tensor | None, result: Tensor | None = None) -> Tensor:
    """``rows[N, A] @ weight[B, A].T + bias[B]``, ``[N, B]``; any strides, but of ``result``, if it is given."""
    (count, width), outputs = rows.shape, weight.shape[0]
    bias = None if bias is None else bias.contiguous()
    result = rows.new_empty(count, outputs) if result is None else result
    if result.numel():
        tile = launch_for(rows, outputs)
        with torch.cuda.device_of(rows):
            _product[ceil_div(count, tile.rows) * ceil_div(outputs, tile.columns),](
                rows,
                weight,
                bias,
                result,
                count,
                outputs,
                width,
                *rows.stride(),
                *weight.stride(),
                ROWS=tile.rows,
                COLUMNS=tile.columns,
                STEP=tile.step,
                num_warps=tile.warps,
                num_stages=tile.stages,
            )
    return result


def launch_for(rows: Tensor, outputs: int) -> Launch:
    """The tiles for so many rows and outputs."""
    gpu = gpu_of(rows.device)
    if rows.dtype == torch.float32 or gpu.shared_bytes < BYTES:
        return SMALL
    for launch in LAUNCHES:
        if ceil_div(len(rows), launch.rows) * ceil_div(outputs, launch.columns) >= gpu.multiprocessors:
            return launch
    return LAUNCHES[-1]


# N rows of width A, B outputs. The number of rows is the batch's: specialised, it would compile the kernel anew.
@triton.jit(do_not_specialize=["count"])
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
    # Eight tiles of rows take turns, so that those which run together share weights in the cache.
    row_tile, column_tile = tl.swizzle2d(
        tl.program_id(0) // tl.cdiv(outputs, COLUMNS),
        tl.program_id(0) % tl.cdiv(outputs, COLUMNS),
        tl.cdiv(count, ROWS),
        tl.cdiv(outputs, COLUMNS),
        8,
    )
    row = row_tile * ROWS + tl.arange(0, ROWS).to(tl.int64)  # [ROWS]
    column = column_tile * COLUMNS + tl.arange(0, COLUMNS).to(tl.int64)  # [COLUMNS]
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
