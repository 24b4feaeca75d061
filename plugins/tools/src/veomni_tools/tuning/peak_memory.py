"""The most memory that a call holds at once, beyond what was held before it."""

from __future__ import annotations

from collections.abc import Callable

import torch


def peak_bytes(call: Callable[[], object], device: torch.device) -> int:
    """Run ``call`` once. On the CPU the allocator's own events are summed; on a GPU its statistics are read.

    Returns:
        The bytes; 0 on a device whose allocator tells nothing, so that memory decides nothing there.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    return _peak_of_the_allocator(call) if device.type == "cpu" else 0


def _peak_of_the_allocator(call: Callable[[], object]) -> int:
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        call()
    kineto = profile.profiler.kineto_results if profile.profiler else None
    events = sorted(kineto.events() if kineto else (), key=lambda event: event.start_ns())
    held = peak = 0
    for event in events:
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak
