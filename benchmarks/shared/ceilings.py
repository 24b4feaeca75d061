"""What this GPU can do at most, measured in the same run as what is compared with it."""

from __future__ import annotations

import torch

from benchmarks.shared.measuring import timing


def copy_gb_per_second() -> float:
    """How fast 2 GiB are copied, bytes read and written counted: the ceiling of what is bound by memory."""
    source = torch.ones(2**30, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    return 2 * source.nbytes / timing(lambda: target.copy_(source)).median / 1e6


def product_tflop_per_second() -> float:
    """How fast two bf16 matrices of 8192 squared are multiplied: the ceiling of what is bound by arithmetic."""
    size = 8192
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / timing(lambda: a @ b).median / 1e9
