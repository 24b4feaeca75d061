"""Temporarily handles Ctrl-C (SIGINT) and SIGTERM."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 130  # the exit code of a command that one of the signals ended early

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def receiving(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handle SIGINT and SIGTERM with ``handler``; restore the previous handlers afterwards."""
    previous = {number: signal.signal(number, handler) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)
