"""The number of multiprocessors: grids of persistent programs are sized by it."""

from __future__ import annotations

from functools import cache

import torch


@cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of ``device``; two on a CPU, where Triton's interpreter runs one program after another."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
