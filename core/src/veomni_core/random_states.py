"""Keeps the process's random states unchanged while other code runs. Imports neither torch nor NumPy."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

Restore = Callable[[], Any]


@contextmanager
def random_states_kept() -> Iterator[None]:
    """Restore the random states of Python, NumPy, torch and the GPUs in use on exit.

    A library that is imported only inside the context is not restored: it had no state before.
    """
    restore = list(_states())
    try:
        yield
    finally:
        for each in restore:
            each()


@contextmanager
def random_states_kept_while_alone() -> Iterator[None]:
    """As :func:`random_states_kept` in a process of one thread. Otherwise nothing is restored.

    What other threads drew meanwhile would be drawn again.
    """
    if threading.active_count() > 1:
        yield
        return
    with random_states_kept():
        yield


def _states() -> Iterator[Restore]:
    yield partial(random.setstate, random.getstate())
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        yield partial(numpy.random.set_state, numpy.random.get_state())
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return
    for generator in (torch.default_generator, *(torch.cuda.default_generators if torch.cuda.is_initialized() else ())):
        yield partial(generator.set_state, generator.get_state())
