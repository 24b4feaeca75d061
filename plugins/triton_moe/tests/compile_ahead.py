"""Calls of this plugin's kernels for layers of real models' widths. Arguments: the dtype, the GPU, and which calls."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
from torch import Tensor

from calls_ahead import Call, compile_calls
from veomni_triton_moe import load_balancing_loss, moe_experts


def calls(dtype: torch.dtype) -> Iterator[tuple[str, Call]]:
    """Calls that each have a launch of their own, and give one tensor that wants gradients."""

    def tensor(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, requires_grad=True)

    def experts(count: int, tokens: int, hidden: int, intermediate: int) -> Tensor:
        index, weights = torch.zeros(tokens, 2, dtype=torch.int64), tensor(tokens, 2)
        projections = tensor(count, 2 * intermediate, hidden), tensor(count, hidden, intermediate)
        return moe_experts.standard(tensor(tokens, hidden), index, weights, *projections)

    yield "experts with few rows", lambda: experts(8, 256, 2048, 768)
    yield "experts with many rows", lambda: experts(2, 512, 2048, 768)
    yield "large experts", lambda: experts(2, 512, 4096, 2048)
    yield "experts that descriptors don't take", lambda: experts(2, 512, 2056, 772)
    for experts_count in (8, 512):
        yield (
            f"balance of {experts_count} experts",
            lambda count=experts_count: load_balancing_loss.standard((tensor(4096, count),) * 2, count, 2),
        )


if __name__ == "__main__":
    compile_calls(calls, *sys.argv[1:])
