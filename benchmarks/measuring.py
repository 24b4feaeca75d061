"""Times and peak memory of forward and backward, on a CPU or a CUDA GPU."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Call = Callable[[], Tensor]
# glibc otherwise gives freed memory back to the system and faults it in again page by page, in some processes at every
# call and in others at none: swiglu_mlp then took 6 or 28 ms.
KEEP_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}


def leaf(*shape: int, scale: float = 1.0, **options: Any) -> Tensor:
    """Normal values that want a gradient."""
    return (torch.randn(*shape, **options) * scale).requires_grad_()


def seconds(calls: dict[str, Call], inputs: Sequence[Tensor], repeats: int) -> dict[str, float]:
    """The median time of each call's forward and backward; the calls take turns, and the first turn warms up."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(repeats + 1):
        for name, call in calls.items():
            _drop_gradients(inputs)
            _wait(inputs)
            start = time.perf_counter()
            result = call()
            result.backward(torch.ones_like(result))
            _wait(inputs)
            if turn:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def peak_bytes(call: Call, inputs: Sequence[Tensor]) -> dict[str, int]:
    """The most that the allocator held at once above what it held before: in forward, and over both passes."""
    _drop_gradients(inputs)
    return (_peak_bytes_on_cuda if inputs[0].is_cuda else _peak_bytes_on_cpu)(call)


def measured_in_processes(script: str, arguments: Sequence[str], processes: int) -> dict[str, Any]:
    """What ``script`` prints as JSON, with the median over processes of its ``seconds``.

    In processes of its own, none inherits another's heap, and no single one's luck with it decides.
    """
    command, environment = [sys.executable, script, *arguments], {**os.environ, **KEEP_FREED_MEMORY}
    runs = []
    for _ in range(processes):
        result = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE)
        runs.append(json.loads(result.stdout.splitlines()[-1]))
    times = {which: [run["seconds"][which] for run in runs] for which in runs[0]["seconds"]}
    medians = {which: statistics.median(values) for which, values in times.items()}
    return {**runs[0], "seconds": medians, "seconds in each process": times}


def _drop_gradients(inputs: Sequence[Tensor]) -> None:
    for tensor in inputs:
        tensor.grad = None


def _wait(inputs: Sequence[Tensor]) -> None:
    if inputs[0].is_cuda:
        torch.cuda.synchronize()


def _peak_bytes_on_cuda(call: Call) -> dict[str, int]:
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = call()
    forward = torch.cuda.max_memory_allocated()
    result.backward(torch.ones_like(result))
    return {"forward": forward - before, "both": torch.cuda.max_memory_allocated() - before}


def _peak_bytes_on_cpu(call: Call) -> dict[str, int]:
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
