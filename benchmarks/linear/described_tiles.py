"""Products by tiles that the GPU copies itself, from tensors that are described to it (TMA): not bound, only timed.

Sums are those of ``veomni_triton.linear``, in the same order. Rows, weights and results begin at addresses that are
multiples of 16 bytes, and follow each other without a gap. Needs a GPU of SM90 or above.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from veomni_ops.sizes import ceil_div
from veomni_triton.linear import Launch


@triton.jit(do_not_specialize=["count"])
def _product(
    rows,  # described [N, A]
    weight,  # described [B, A]
    result,  # described [N, B]; written
    count,  # N
    outputs,  # B
    width,  # A
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    PARTS: tl.constexpr,
):
    row_tiles, column_tiles = tl.cdiv(count, ROWS), tl.cdiv(outputs, COLUMNS)
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0), flatten=True):
        row_tile, column_tile = tl.swizzle2d(tile // column_tiles, tile % column_tiles, row_tiles, column_tiles, 8)
        row, column = row_tile * ROWS, column_tile * COLUMNS
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for k in range(0, width, STEP):
            total = tl.dot(rows.load([row, k]), weight.load([column, k]).T, total)
        if PARTS == 1:
            result.store([row, column], total.to(result.dtype))
        else:  # halves need half of the shared memory, which the next tile's operands take
            left, right = tl.split(tl.permute(tl.reshape(total, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))
            result.store([row, column], left.to(result.dtype))
            result.store([row, column + COLUMNS // 2], right.to(result.dtype))


def product(rows: Tensor, weight: Tensor, launch: Launch, parts: int, programs: int | None = None) -> Tensor:
    """``rows[N, A] @ weight[B, A].T``.

    Args:
        launch: the tiles.
        parts: 1 or 2, in which a tile is written.
        programs: how many share the tiles; without it each tile has its own.
    """
    (count, width), outputs = rows.shape, len(weight)
    result = rows.new_empty(count, outputs)
    tiles = ceil_div(count, launch.rows) * ceil_div(outputs, launch.columns)
    with torch.cuda.device_of(rows):
        _product[min(tiles, programs or tiles),](
            TensorDescriptor.from_tensor(rows, [launch.rows, launch.step]),
            TensorDescriptor.from_tensor(weight, [launch.columns, launch.step]),
            TensorDescriptor.from_tensor(result, [launch.rows, launch.columns // parts]),
            count,
            outputs,
            width,
            ROWS=launch.rows,
            COLUMNS=launch.columns,
            STEP=launch.step,
            PARTS=parts,
            num_warps=launch.warps,
            num_stages=launch.stages,
        )
    return result
