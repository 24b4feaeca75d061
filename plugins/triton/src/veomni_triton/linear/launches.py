"""The tiles of a product, by the numbers of rows and outputs, and by the GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from veomni_ops.sizes import ceil_div
from veomni_ops.triton_descriptors import can_be_described
from veomni_ops.triton_gpus import gpu_of


@dataclass(frozen=True)
class Launch:
    """How a product is launched.

    Attributes:
        rows: of a tile.
        columns: of a tile.
        step: the columns of operands that a tile sums at a time.
        warps: of a program.
        stages: the depth of the loop's pipeline.
        described: whether the GPU itself copies tiles, from tensors that are described to it (TMA). Programs, one for
            each multiprocessor, then share the tiles.
    """

    rows: int
    columns: int
    step: int
    warps: int
    stages: int
    described: bool = False


# From the largest on: the first of which nearly every multiprocessor has a tile. The fastest on an H200, by
# `benchmarks/linear/triton_linear.py --tune`.
DESCRIBED = (
    Launch(128, 256, 64, 8, 4, True),
    Launch(128, 128, 64, 4, 4, True),
    Launch(64, 128, 64, 4, 6, True),
    Launch(64, 64, 128, 4, 4, True),
    Launch(64, 32, 128, 4, 8, True),
    Launch(64, 16, 128, 4, 8, True),
)
BY_POINTERS = (
    Launch(128, 256, 64, 8, 3),
    Launch(128, 128, 64, 8, 4),
    Launch(64, 128, 64, 4, 4),
    Launch(64, 64, 128, 4, 4),
    Launch(64, 32, 128, 4, 6),
    Launch(64, 16, 128, 4, 8),
)
FEWEST_ROWS = 64  # of a tile
# In the last one's place for so few rows. Its instructions (mma) are others than those for 64 rows (wgmma), and gave
# the same bits on an H200, in 480 products of one to 16 rows with operands of up to e^36 too.
FEW = Launch(16, 16, 512, 2, 4)
SHARED_BYTES = 160 << 10  # which tiles by pointers take
SMALL = Launch(64, 64, 32, 4, 2)


def launch_for(rows: Tensor, weight: Tensor, result: Tensor) -> Launch:
    """The tiles for these operands."""
    gpu, count, outputs = gpu_of(rows.device), len(rows), len(weight)
    if rows.dtype == torch.float32 or gpu.shared_bytes < SHARED_BYTES:
        return SMALL
    # A descriptor of no elements is refused.
    is_described = count >= FEWEST_ROWS and rows.numel() and all(map(can_be_described, (rows, weight, result)))
    launches = DESCRIBED if is_described else BY_POINTERS
    if count <= FEW.rows and gpu.is_hopper:
        launches = (*BY_POINTERS[:-1], FEW)
    for launch in launches[:-1]:
        tiles = ceil_div(count, launch.rows) * ceil_div(outputs, launch.columns)
        is_filled = launch.rows == FEWEST_ROWS or count > launch.rows // 2
        if is_filled and tiles * 16 >= gpu.multiprocessors * 15:
            return launch
    return launches[-1]
