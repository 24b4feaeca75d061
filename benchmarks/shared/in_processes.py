"""Times of contenders over both passes: medians over turns, and over processes."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from benchmarks.shared.measuring import drop_gradients, seconds_in_turns
from benchmarks.shared.memory import peak_bytes
from benchmarks.shared.one_process import KEEP_FREED_MEMORY
from benchmarks.shared.results import ROOT

_T = TypeVar("_T")
Calls = dict[str, Callable[[], Tensor]]


def leaf(*shape: int, scale: float = 1.0, **options: Any) -> Tensor:
    """Normal values that want a gradient."""
    return (torch.randn(*shape, **options) * scale).requires_grad_()


def asked(calls: dict[str, _T], only: Collection[str] | None) -> dict[str, _T]:
    """Those of ``calls`` that are asked for; a peer that isn't is not checked against float64 either."""
    return {name: call for name, call in calls.items() if only is None or name in only}


def figures(
    calls: Calls, inputs: Sequence[Tensor], repeats: int, only: Collection[str] | None = None
) -> dict[str, dict[str, Any]]:
    """The time and the memory of each call that is asked for, as a benchmark's ``measure`` gives them."""
    calls = asked(calls, only)
    return {
        "seconds": median_seconds(calls, inputs, repeats),
        "peak bytes": {name: peak_bytes(call, inputs) for name, call in calls.items()},
    }


def median_seconds(calls: Calls, inputs: Sequence[Tensor], repeats: int) -> dict[str, float]:
    """The median time of each call's forward and backward; the first turn warms up."""
    steps = {name: partial(_both_passes, call) for name, call in calls.items()}
    waits = {"wait": torch.cuda.synchronize} if inputs[0].is_cuda else {}
    times = seconds_in_turns(steps, repeats, before=lambda: drop_gradients(inputs), **waits)
    return {name: statistics.median(values) for name, values in times.items()}


def _both_passes(call: Callable[[], Tensor]) -> None:
    result = call()
    result.backward(torch.ones_like(result))


def measured_in_processes(script: str, device: str, shape: str, repeats: int, processes: int) -> dict[str, Any]:
    """What the ``BENCHMARK`` of ``script`` measures, with the median over processes of its ``seconds``.

    In processes of its own, none inherits another's heap, and no single one's luck with it decides.
    """
    asked = ["--device", device, "--shapes", shape, "--repeats", str(repeats)]
    command = [sys.executable, "-m", "benchmarks.shared.one_process", script, *asked]
    environment = {**os.environ, **KEEP_FREED_MEMORY}
    runs = []
    for _ in range(processes):
        result = subprocess.run(command, env=environment, cwd=ROOT, check=True, stdout=subprocess.PIPE)
        runs.append(json.loads(result.stdout.splitlines()[-1])["figures"][shape])
    times = {which: [run["seconds"][which] for run in runs] for which in runs[0]["seconds"]}
    medians = {which: statistics.median(values) for which, values in times.items()}
    return {**runs[0], "seconds": medians, "seconds in each process": times}
