"""Checks that two threads may call a kernel at the same time.

Data-parallel wrappers, servers that evaluate while they train, and prefetching call a model from several threads. A
kernel that keeps something in a global or in a module's attribute between two of its lines gets the other thread's.

Whether that happens would be luck, so the threads take turns: after one or a few lines of Python outside of PyTorch,
the other thread runs some. What C++ code does in parallel with itself is not seen.
"""

from __future__ import annotations

import functools
import itertools
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from veomni_conformance.situations import first_of, reveal
from veomni_conformance.subject import Outcome, Position, Subject

_RUNS = ((1,), (1, 3, 2, 5, 4, 7))  # the lines of each turn: in step, and out of step
_TURNS = 600  # then both run freely: an interpreter of kernels has a hundred thousand lines
_PATIENCE = 0.05  # seconds, after which a thread goes on without the other
_LIBRARIES = (f"{Path(torch.__file__).parent}/", f"{Path(__file__).parent}/")
_STANDARD_LIBRARY = f"{sysconfig.get_path('stdlib')}/"


def check_concurrent_calls(subject: Subject, position: Position) -> Iterator[str]:
    """Run forward and backward in two threads that take turns, each on values of its own."""
    for other in (False, True):
        subject.exact(position, other)
    yield from first_of(
        sentence
        for runs in _RUNS
        for sentence in reveal(
            "called from two threads at the same time",
            lambda r=runs: _at_the_same_time(subject, position, r),  # type: ignore[misc]
        )
    )


def _at_the_same_time(subject: Subject, position: Position, runs: tuple[int, ...]) -> str | None:
    turns, outcomes, raised = _Turns(runs), dict[bool, Outcome](), list[BaseException]()

    def run(other: bool) -> None:
        sample = subject.draw(position, other)
        try:
            with _stream(subject):
                with turns.taken_by(int(other)):
                    outcomes[other] = subject.outcome(sample)
                if subject.device.type == "cuda":
                    # Before the inputs are freed: they belong to another stream, which may give their memory away while
                    # this one still reads it.
                    torch.cuda.current_stream(subject.device).synchronize()
        except BaseException as error:  # raised again in the calling thread
            raised.append(error)

    threads = [threading.Thread(target=run, args=(other,)) for other in (False, True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if raised:
        raise raised[0]
    problems = (subject.problem(found, subject.exact(position, other)) for other, found in outcomes.items())
    return next((problem for problem in problems if problem), None)


def _stream(subject: Subject) -> AbstractContextManager[Any]:
    if subject.device.type != "cuda":
        return nullcontext()
    stream = torch.cuda.Stream(subject.device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(subject.device))
    return torch.cuda.stream(stream)


class _Turns:
    """Hands the turn from one of two threads to the other after each run of lines of the kernel's code."""

    def __init__(self, runs: tuple[int, ...]) -> None:
        self._condition = threading.Condition()
        self._turn, self._count, self._active = 0, 0, {0, 1}
        self._blocked: set[int] = set()  # threads that did not take their turn: they may wait for a lock of the kernel
        self._runs = itertools.cycle(runs)
        self._left = next(self._runs)

    @property
    def are_over(self) -> bool:
        """Whether both threads run freely from now on."""
        return self._count > _TURNS or len(self._active) < 2

    def taken_by(self, thread: int) -> _TurnTaker:
        """A context in which the current thread is number ``thread``."""
        return _TurnTaker(self, thread)

    def after_a_line(self, thread: int) -> None:
        """At the end of the thread's run: let the other one run, and wait for the turn."""
        with self._condition:
            self._left -= 1
            if self._left > 0 or self.are_over:
                return
            self._count, self._left = self._count + 1, next(self._runs)
            self._blocked.discard(thread)
            self._turn = 1 - thread
            self._condition.notify_all()
            if self._turn in self._blocked:
                return
            if not self._condition.wait_for(lambda: self._turn == thread or len(self._active) < 2, _PATIENCE):
                self._blocked.add(1 - thread)

    def end(self, thread: int) -> None:
        """The thread's call is over: the other one runs on alone."""
        with self._condition:
            self._active.discard(thread)
            self._condition.notify_all()


class _TurnTaker:
    """Traces the lines of the current thread."""

    def __init__(self, turns: _Turns, thread: int) -> None:
        self._turns, self._thread = turns, thread

    def __enter__(self) -> None:
        self._before = sys.gettrace()
        sys.settrace(self._trace)

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)
        self._turns.end(self._thread)

    def _trace(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        if self._turns.are_over:
            sys.settrace(None)
            return None
        if not _may_be_the_kernels(frame.f_code.co_filename):
            return None
        if event == "line":
            self._turns.after_a_line(self._thread)
        return self._trace


@functools.cache
def _may_be_the_kernels(file: str) -> bool:
    """Whether the code of ``file`` is neither PyTorch's, nor Python's, nor this check's."""
    if file.startswith(_LIBRARIES):
        return False
    return not file.startswith(_STANDARD_LIBRARY) or "site-packages" in file
