"""How a time is taken. Every benchmark that measures one itself does so here.

- :func:`timing`: one call on a GPU, by CUDA events, with a cold L2 cache; the median of as many calls as fit.
- :func:`milliseconds`: the same on a GPU, and on a CPU by the wall clock, for a try on a tiny shape.
- :func:`captured`: the same call as a CUDA graph, to be timed in its place: the GPU's share, without Python's.
- :func:`event_milliseconds`: whole steps on a GPU, by CUDA events, one after the other as in training.
- :func:`seconds` and :func:`seconds_in_turns`: the wall clock, for CPUs, processes, and several GPUs at once.
- :func:`wall_clock`: the moments at which a library calls back, for the time between two of them.
- :func:`command`: a command as its user waits for it: until it prints a line, with its processor time and its memory.

Every one of them, but the last, warms up before it counts, or says that its caller must.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Call = Callable[[], Any]


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Timing:
    """Milliseconds: the median, and the 20th and 80th percentile."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} ms ({self.low:.3f} to {self.high:.3f})"


def wall_clock() -> float:
    """Seconds since some moment, once a GPU has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def timing(call: Call, rep: int = 300) -> Timing:
    """Time ``call`` on a GPU for about ``rep`` milliseconds, after a warm-up, with the L2 cache cleared before each."""
    from triton.testing import do_bench  # here, since CPUs are measured without Triton

    warm_up(call)
    median, low, high = do_bench(call, warmup=50, rep=rep, quantiles=[0.5, 0.2, 0.8])
    return Timing(median, low, high)


def milliseconds(call: Call, device: str, rep: int = 200) -> dict[str, float]:
    """:func:`timing` as JSON holds it. On a CPU the least, the median and the longest of three calls."""
    if device == "cuda":
        return asdict(timing(call, rep))
    low, median, high = sorted(1e3 * each for each in seconds(call, 3))
    return {"median": median, "low": low, "high": high}


def warm_up(call: Call, times: int = 3) -> None:
    """Call what compiles, searches or allocates at first, and wait for the GPU."""
    for _ in range(times):
        call()
    torch.cuda.synchronize()


def event_milliseconds(call: Call, repeats: int) -> list[float]:
    """Time each of ``repeats`` calls on a GPU. The caller warms up, and caches stay as the call before left them."""
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return times


def seconds(call: Call, repeats: int, warm_ups: int = 1, before: Call = _nothing, wait: Call = _nothing) -> list[float]:
    """:func:`seconds_in_turns` of one call."""
    return seconds_in_turns({"": call}, repeats, warm_ups, before, wait)[""]


def seconds_in_turns(
    calls: Mapping[str, Call], repeats: int, warm_ups: int = 1, before: Call = _nothing, wait: Call = _nothing
) -> dict[str, list[float]]:
    """Time ``calls`` on the wall clock. They take turns, so that a slow spell of the machine meets all of them.

    Args:
        calls: what is timed, by name.
        repeats: the number of turns that count.
        warm_ups: the number of turns before them.
        before: called before each call, and not timed.
        wait: called before the clock is read, each time: ``torch.cuda.synchronize`` for what runs on a GPU.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(warm_ups + repeats):
        for name, call in calls.items():
            before()
            wait()
            start = time.perf_counter()
            call()
            wait()
            taken = time.perf_counter() - start
            if turn >= warm_ups:
                times[name].append(taken)
    return times


@dataclass(frozen=True)
class CommandRun:
    """What a command took: seconds until the line that was waited for, and of processors in all; peak memory."""

    seconds: float
    processor_seconds: float
    peak_bytes: int  # resident memory, in which mapped pages count that the process has touched
    lines: tuple[str, ...]


def command(parts: Sequence[str], until: str, folder: Path) -> CommandRun:
    """Run a command in ``folder``, and time it from its start to the first line that begins with ``until``.

    Raises:
        SystemExit: the command failed, or printed no such line.
    """
    lines, seconds = [], None
    start = time.perf_counter()
    process = subprocess.Popen(parts, stdout=subprocess.PIPE, text=True, cwd=folder)
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line.rstrip("\n"))
        if seconds is None and line.startswith(until):
            seconds = time.perf_counter() - start
    _, status, usage = os.wait4(process.pid, 0)
    if status or seconds is None:
        raise SystemExit(f"{' '.join(parts)} failed, or printed no line that begins with {until!r}")
    return CommandRun(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024, tuple(lines))


def training_step(forward: Call, backward: Callable[[Any], Any], inputs: Iterable[Tensor]) -> Call:
    """Forward and backward as one call, with the gradients of ``inputs`` dropped first."""
    inputs = list(inputs)

    def step() -> None:
        drop_gradients(inputs)
        backward(forward())

    return step


def drop_gradients(inputs: Iterable[Tensor]) -> None:
    """Give back the gradients' memory, so that a backward makes new ones instead of adding to these."""
    for tensor in inputs:
        tensor.grad = None


def captured(step: Call) -> Call | None:
    """A replay of ``step`` as one CUDA graph: the GPU's share alone. ``None`` if it can't be captured."""
    before, stream, graph = torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    try:
        with torch.cuda.stream(stream):
            step()
            with torch.cuda.graph(graph, stream=stream):
                step()
    except (AssertionError, RuntimeError) as error:  # FlashQLA asserts that what it derives from a call is known
        from veomni_trainer.loop.step_graphs import forget_failed_capture  # its imports take seconds

        print(f"not captured: {[*str(error).splitlines(), type(error).__name__][0]}")
        forget_failed_capture(before)
        return None
    return graph.replay
