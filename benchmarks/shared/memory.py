"""How much memory a call holds beyond what was held before it, on a GPU or a CPU."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from benchmarks.shared.measuring import Call, drop_gradients


def peak_mib(call: Call) -> float:
    """The most memory that ``call`` holds at once on a GPU."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def peak_mib_of_step(step: Call, inputs: Sequence[Tensor]) -> float:
    """The same of a training step, the gradients of ``inputs`` among it, after a first one that may compile."""
    step()
    drop_gradients(inputs)
    return peak_mib(step)


def saved_mib(forward: Call) -> float:
    """What ``forward`` leaves allocated for its backward, its result included."""
    before = torch.cuda.memory_allocated()
    result = forward()
    after = torch.cuda.memory_allocated()
    del result
    return (after - before) / 2**20


def peak_bytes(call: Callable[[], Tensor], inputs: Sequence[Tensor]) -> dict[str, int]:
    """The most that the allocator held at once: in forward, and over both passes."""
    drop_gradients(inputs)
    return (_peak_bytes_on_cuda if inputs[0].is_cuda else _peak_bytes_on_cpu)(call)


def _peak_bytes_on_cuda(call: Callable[[], Tensor]) -> dict[str, int]:
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = call()
    forward = torch.cuda.max_memory_allocated()
    result.backward(torch.ones_like(result))
    return {"forward": forward - before, "both": torch.cuda.max_memory_allocated() - before}


def _peak_bytes_on_cpu(call: Callable[[], Tensor]) -> dict[str, int]:
    """Summed over the allocator's own events of one run."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        result = call()
        with torch.profiler.record_function("forward is over"):
            pass
        result.backward(torch.ones_like(result))
        del result
    events = sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    held = peak = forward = 0
    for event in events:
        if event.name() == "forward is over":
            forward = peak
        elif event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return {"forward": forward, "both": peak}
