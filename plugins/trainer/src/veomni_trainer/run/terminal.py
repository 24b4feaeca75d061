"""What a command and its terminal say to each other: text of the first process alone, and the signals that end it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from veomni_core.commands import fit

INTERRUPTED = 130  # the exit code of a command that one of the signals ended early


def is_main_process() -> bool:
    """Whether this process speaks and writes for the job."""
    return os.environ.get("RANK", "0") == "0"


def print_once(text: str) -> None:
    """Print ``text`` in the first process, broken between words where a line is longer than the terminal."""
    if is_main_process():
        print(fit(text), flush=True)


@contextmanager
def receiving(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handle SIGINT and SIGTERM with ``handler``; restore the previous handlers afterwards."""
    previous = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)
