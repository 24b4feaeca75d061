"""What the time of a check goes to: compilers, the kernel, the reference, and comparing.

Whoever waits for a check wants to know which of them to wait for. What is entered last counts: a compiler that a kernel
starts, in whichever thread, is the compiler's time and not the kernel's.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

COMPILING, KERNEL, REFERENCE, COMPARING, OTHER = "compiling", "kernel", "reference", "comparing", "other"


class TimeSpent:
    """Adds up seconds by what they were spent on.

    Args:
        clock: says the seconds since some moment.

    Example:
        >>> readings = iter([0, 1, 3, 10, 10])  # made, entered, entered, left, left
        >>> spent = TimeSpent(clock=lambda: next(readings))
        >>> with spent.on(KERNEL):
        ...     with spent.on(COMPILING):
        ...         pass
        >>> spent.seconds[OTHER], spent.seconds[KERNEL], spent.seconds[COMPILING]
        (1.0, 2.0, 7.0)
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.seconds: dict[str, float] = dict.fromkeys((COMPILING, KERNEL, REFERENCE, COMPARING, OTHER), 0.0)
        self._open: list[tuple[object, str]] = []
        self._since, self._lock = clock(), Lock()

    @contextmanager
    def on(self, what: str) -> Iterator[None]:
        """Count the time inside as spent on ``what``."""
        key = object()
        self.enter(key, what)
        try:
            yield
        finally:
            self.leave(key)

    @property
    def now(self) -> str:
        """What time is spent on now."""
        return self._open[-1][1] if self._open else OTHER

    def rounded(self) -> dict[str, float]:
        """The seconds until now, by what they were spent on."""
        with self._lock:
            self._charge()
        return {what: round(seconds, 2) for what, seconds in self.seconds.items()}

    def enter(self, key: object, what: str) -> None:
        """Begin to count ``what``, until ``key`` leaves. Threads may leave in another order than they entered."""
        with self._lock:
            self._charge()
            self._open.append((key, what))

    def leave(self, key: object) -> None:
        """End what ``key`` entered last; nothing if there is none."""
        with self._lock:
            self._charge()
            for index in reversed(range(len(self._open))):
                if self._open[index][0] == key:
                    del self._open[index]
                    return

    def _charge(self) -> None:
        since, self._since = self._since, self._clock()
        self.seconds[self.now] += self._since - since


@contextmanager
def compilers_counted(spent: TimeSpent) -> Iterator[None]:
    """Count as compiling what Triton and ``torch.compile`` take, if they are imported. Others count as the kernel's."""
    undo: list[Callable[[], Any]] = []
    if "triton" in sys.modules:
        undo.append(_count_triton(spent, sys.modules["triton"]))
    if "torch._dynamo.callback" in sys.modules:
        undo.append(_count_torch(spent, sys.modules["torch._dynamo.callback"]))
    try:
        yield
    finally:
        for each in undo:
            each()


def _count_triton(spent: TimeSpent, triton: Any) -> Callable[[], None]:
    compiled = triton.compiler.CompiledKernel
    compile_one, load_one = triton.compiler.compile, compiled._init_handles

    def counted(*args: Any, **kwargs: Any) -> Any:
        with spent.on(COMPILING):
            return compile_one(*args, **kwargs)

    def loaded(self: Any) -> Any:  # at the first launch, for which a launcher in C is compiled
        with spent.on(COMPILING):
            return load_one(self)

    def undo() -> None:
        triton.compiler.compile, compiled._init_handles = compile_one, load_one

    triton.compiler.compile = counted  # each function of Triton's takes it from here at its first launch
    compiled._init_handles = loaded
    return undo


def _count_torch(spent: TimeSpent, callback: Any) -> Callable[[], None]:
    handler, key = callback.callback_handler, object()

    def start(*_: Any) -> None:
        spent.enter(key, COMPILING)

    def end(*_: Any) -> None:
        spent.leave(key)

    handler.register_start_callback(start)
    handler.register_end_callback(end)

    def undo() -> None:
        handler.remove_start_callback(start)
        handler.remove_end_callback(end)

    return undo
