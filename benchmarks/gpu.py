"""What a GPU benchmark measures of a call: time with its spread, memory, launches; and the machine's own ceilings."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.testing import do_bench

Call = Callable[[], Any]


@dataclass(frozen=True)
class Timing:
    """Milliseconds: the median, and the 20th and 80th percentile."""

    median: float
    low: float
    high: float


def timing(call: Call, rep: int = 300) -> Timing:
    """Time ``call`` for about ``rep`` milliseconds after warming up, with the L2 cache cleared between calls."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    median, low, high = do_bench(call, warmup=50, rep=rep, quantiles=[0.5, 0.2, 0.8])
    return Timing(median, low, high)


def peak_mib(step: Call) -> float:
    """The peak of ``step`` beyond what lives before and after it: inputs, and the gradients that it leaves."""
    step()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def saved_mib(forward: Call) -> float:
    """What ``forward`` leaves allocated for its backward, its result included."""
    before = torch.cuda.memory_allocated()
    result = forward()
    after = torch.cuda.memory_allocated()
    del result
    return (after - before) / 2**20


def launches(step: Call) -> int:
    """How many kernels ``step`` starts."""
    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    device = torch.autograd.DeviceType.CUDA
    return sum(event.count for event in profile.key_averages() if event.device_type == device)


def training_step(call: Call, inputs: Sequence[Tensor], upstream: Tensor) -> Call:
    """Forward and backward, with the gradients of ``inputs`` dropped first."""

    def step() -> None:
        for tensor in inputs:
            tensor.grad = None
        call().backward(upstream)

    return step


def relative_error(found: Tensor, exact: Tensor) -> float:
    """``norm(found - exact) / norm(exact)``."""
    return ((found.double() - exact).norm() / exact.norm()).item()


def ceilings() -> dict[str, float]:
    """A bf16 product of 8192 cubed in TFLOP/s, and a copy of 2 GiB in GB/s, read and written bytes counted."""
    size = 8192
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = timing(lambda: a @ b).median
    source = torch.randn(2**30, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    copy = timing(lambda: target.copy_(source)).median
    return {"product TFLOP/s": 2 * size**3 / product / 1e9, "copy GB/s": 2 * source.nbytes / copy / 1e6}
