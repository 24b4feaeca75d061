"""Which kernels the GPU runs in a call, by torch's profiler: how many, and for how long each."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from benchmarks.shared.measuring import Call

IDLE = "idle"


def launches(step: Call) -> int:
    """How many kernels ``step`` starts."""
    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    device = torch.autograd.DeviceType.CUDA
    return sum(event.count for event in profile.key_averages() if event.device_type == device)


def launch_times(call: Call) -> list[tuple[str, float]]:
    """The kernels of one ``call`` in the order in which they ran, each with its milliseconds."""
    return [(name, span.elapsed_us() / 1e3) for name, span in _spans(call)]


def kernel_times(call: Call) -> dict[str, float]:
    """Milliseconds in one ``call`` by kernel, the longest first; :data:`IDLE` is what lies between them."""
    spans = _spans(call)
    times: Counter[str] = Counter()
    for name, span in spans:
        times[name] += span.elapsed_us() / 1e3
    whole = max(span.end for _, span in spans) - min(span.start for _, span in spans)
    return {**dict(times.most_common()), IDLE: whole / 1e3 - times.total()}


def _spans(call: Call) -> list[tuple[str, Any]]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    device = torch.autograd.DeviceType.CUDA
    spans = [(event.name, event.time_range) for event in profile.events() if event.device_type == device]
    return sorted(spans, key=lambda each: each[1].start)
