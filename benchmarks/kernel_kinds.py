"""What the GPU does in a call: how long each kind of kernel runs, and how long none does, by torch's profiler."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

import torch

from gpu import Call

# The first pattern found in a kernel's name says its kind. Triton's products are veomni-triton-moe's.
KINDS: Mapping[str, str] = {
    "attention": r"flash|fmha|sdpa|attention",
    "matrix products": r"gemm|nvjet|cutlass|cublas|^_(gate_up|row_product|weight_gradient)$",
}
OTHER, IDLE = "other kernels", "idle"


def kernel_times(call: Call) -> dict[str, float]:
    """Milliseconds in one ``call`` by kernel, the longest first; :data:`IDLE` is what lies between them."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    device = torch.autograd.DeviceType.CUDA
    spans = [(event.name, event.time_range) for event in profile.events() if event.device_type == device]
    times: Counter[str] = Counter()
    for name, span in spans:
        times[name] += span.elapsed_us() / 1e3
    whole = max(span.end for _, span in spans) - min(span.start for _, span in spans)
    return {**dict(times.most_common()), IDLE: whole / 1e3 - times.total()}


def by_kind(times: Mapping[str, float]) -> dict[str, float]:
    """:func:`kernel_times` by kind of kernel; what no pattern names is :data:`OTHER`."""
    sums = dict.fromkeys((*KINDS, OTHER, IDLE), 0.0)
    for name, time in times.items():
        kinds = [kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE)]
        sums[IDLE if name == IDLE else (*kinds, OTHER)[0]] += time
    return sums
