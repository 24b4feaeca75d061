"""Takes times: contenders take turns, so that a slow spell of the machine meets all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from veomni_tools.profiles.profile import Times

Call = Callable[[], object]


class Timed(Protocol):
    """What is timed: a call, and what must hold around it, which costs no time that is taken."""

    def run(self) -> object:
        """Run once."""

    def in_place(self) -> AbstractContextManager[Any]:
        """The context in which it runs."""


# One reading spans so many milliseconds, where a call is shorter: events and clocks are too coarse for one norm.
_SPAN = 4.0
_MOST_CALLS = 200


class Clock(Protocol):
    """Says how long calls take."""

    def milliseconds(self, call: Call, calls: int) -> float:
        """Milliseconds that so many calls of ``call``, one after the other, take together."""


class WallClock:
    """Reads the wall clock, once the device is idle."""

    def __init__(self, device: torch.device) -> None:
        self._waits = device.type != "cpu"

    def milliseconds(self, call: Call, calls: int) -> float:
        self._wait()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        self._wait()
        return 1e3 * (time.perf_counter() - start)

    def _wait(self) -> None:
        if self._waits:
            torch.accelerator.synchronize()


class EventClock:
    """Reads CUDA events around the calls, as the GPU reaches them."""

    def milliseconds(self, call: Call, calls: int) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        for _ in range(calls):
            call()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end)


def clock_for(device: torch.device) -> Clock:
    """The clock of ``device``."""
    return EventClock() if device.type == "cuda" else WallClock(device)


@dataclass(frozen=True)
class Turns:
    """How often each contender is timed.

    Attributes:
        least: the turns that each has at least.
        most: the turns after which no more are taken.
        seconds: for all contenders together; once they are over, no turn begins beyond the ``least``.
    """

    least: int = 5
    most: int = 40
    seconds: float = 3.0


def times_in_turns(steps: Mapping[str, Timed], clock: Clock, turns: Turns) -> dict[str, Times]:
    """Time ``steps``, all of which have run before, in turns; each turn begins with another one."""

    def read(name: str, calls: int) -> float:
        with steps[name].in_place():
            return clock.milliseconds(steps[name].run, calls)

    if not steps:
        return {}
    first = {name: read(name, 1) for name in steps}
    spans = {name: min(_MOST_CALLS, max(1, int(_SPAN / max(ms, 1e-3)))) for name, ms in first.items()}
    found: dict[str, list[float]] = {name: [] for name in steps}
    names, spent, turn = list(steps), 0.0, 0
    while turn < turns.least or (turn < turns.most and spent < 1e3 * turns.seconds):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            taken = read(name, spans[name])
            spent += taken
            found[name].append(taken / spans[name])
        turn += 1
    return {name: _times(taken) for name, taken in found.items()}


def _times(taken: list[float]) -> Times:
    if len(taken) == 1:
        return Times(taken[0], taken[0], taken[0])
    fifths = statistics.quantiles(taken, n=5, method="inclusive")
    return Times(statistics.median(taken), fifths[0], fifths[-1])
