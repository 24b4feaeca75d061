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
def random_states_kept(only_while_alone: bool = False) -> Iterator[None]:
    """Restore the random states of Python, NumPy, torch and the GPUs in use on exit.

    A library that is imported only inside the context is not restored: it had no state before. With
    ``only_while_alone``, neither is a process of several threads: what others drew meanwhile would be drawn again.
    """
    restore = [] if only_while_alone and threading.active_count() > 1 else list(_states())
    try:
        yield
    finally:
        for each in restore:
            each()


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
