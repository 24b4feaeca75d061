"""Triton functions that search among launches, made to take one of them: so each can be checked, and none is timed.

A function that is autotuned runs with the launch that was fastest for a shape on this machine. A check finds it for the
contract's shapes, and a training for its own. Where Triton compiles one of the launches wrongly, a check may pass, and
the training be wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from veomni_core.errors import HostError


@contextmanager
def taking_launch(index: int) -> Iterator[None]:
    """A context in which every search gives the launch at ``index`` of those that it may take; -1 is the last.

    What needs more shared memory or registers than the GPU has is passed over, as a search does; the next one towards
    the middle of the list is taken then.

    Raises:
        HostError: Triton is not installed here.
    """
    try:
        from triton.runtime import autotuner, errors
    except ImportError as error:
        raise HostError(f"Triton is not installed here ({error}), so it searches for no launch") from error
    run, bench = autotuner.Autotuner.run, autotuner.Autotuner._bench
    too_large: dict[int, list[Any]] = {}  # of each function, by its id: it outlives this context

    def rank(self: Any, *args: Any, config: Any, **meta: Any) -> float:
        """In place of its time: how far ``config`` is from the one that is asked for."""
        if config in too_large.get(id(self), ()):
            return float("inf")
        at = self.configs.index(config)
        last = len(self.configs) - 1
        return float(abs(at - min(index, last)) if index >= 0 else abs(at - max(last + 1 + index, 0)))

    def run_that_launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        # What is remembered on disk was timed, and what is found here must not be remembered there. Triton 3.3 has no
        # such memory.
        remembers, self.cache_results = getattr(self, "cache_results", False), False
        try:
            while True:
                try:
                    return run(self, *args, **kwargs)
                except errors.OutOfResources:
                    tried = too_large.setdefault(id(self), [])
                    if len(tried) + 1 >= len(self.configs):
                        raise
                    tried.append(self.best_config)
                    self.cache.clear()
        finally:
            self.cache_results = remembers

    autotuner.Autotuner.run, autotuner.Autotuner._bench = run_that_launch, rank
    try:
        yield
    finally:
        autotuner.Autotuner.run, autotuner.Autotuner._bench = run, bench
