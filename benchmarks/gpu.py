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

    def __str__(self) -> str:
        return f"{self.median:.3f} ms ({self.low:.3f} to {self.high:.3f})"


def timing(call: Call, rep: int = 300) -> Timing:
    """Time ``call`` for about ``rep`` milliseconds after warming up, with the L2 cache cleared between calls."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    median, low, high = do_bench(call, warmup=50, rep=rep, quantiles=[0.5, 0.2, 0.8])
    return Timing(median, low, high)


def peak_mib(call: Call) -> float:
    """The most memory that ``call`` holds at once, beyond what is held before it."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
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


def captured(forward: Call, backward: Callable[[Any], None], inputs: Sequence[Tensor]) -> Call | None:
    """A replay of forward and backward as one CUDA graph: the GPU's share alone. ``None`` if it can't be captured."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()

    def both() -> None:
        for tensor in inputs:
            tensor.grad = None
        backward(forward())

    try:
        with torch.cuda.stream(stream):
            both()
            with torch.cuda.graph(graph, stream=stream):
                both()
    except RuntimeError as error:
        print(f"not captured: {str(error).splitlines()[0]}")
        return None
    return graph.replay


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
