"""How kernels of attention are launched: tiles, and the columns of heads whose width is no power of two."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from veomni_ops.sizes import power_of_two
from veomni_ops.triton_gpus import gpu_of


@dataclass(frozen=True)
class Launch:
    """Queries of a tile (rows, of a chosen block's), keys of a tile, warps, and the depth of the loop's pipeline."""

    queries: int
    keys: int
    warps: int
    stages: int


SMALL = Launch(32, 32, 4, 1)  # in float32, and for GPUs with less shared memory
BYTES = 200 << 10


def takes_small(query: Tensor) -> bool:
    """Whether launches for ``query`` are :data:`SMALL`."""
    return query.dtype == torch.float32 or gpu_of(query.device).shared_bytes < BYTES


def constants_of(query: Tensor, value_width: int, launch: Launch) -> dict[str, Any]:
    """Widths, the columns ``D``, ``E`` and ``V`` of tiles, as ``attention_tiles`` has them, and other constants."""
    width = query.shape[-1]
    first = max(16, 1 << width.bit_length() - 1)  # the greatest power of two in it
    rest = max(16, power_of_two(width - first))
    split = first < width and first + rest < 2 * first
    return {
        "width": width,
        "value_width": value_width,
        "D": first if split else max(16, power_of_two(width)),
        "E": rest if split else 16,
        "SPLIT": split,
        "V": max(16, power_of_two(value_width)),
        "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32",
        "num_warps": launch.warps,
        "num_stages": launch.stages,
    }
