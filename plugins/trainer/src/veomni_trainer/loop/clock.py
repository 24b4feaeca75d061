"""Measures step times, without the pauses for writing checkpoints and for validation."""

from __future__ import annotations

import time


class StepClock:
    """Sums seconds, steps and tokens between two calls of :meth:`read`."""

    def __init__(self) -> None:
        self._mark: float | None = None
        self._seconds, self._steps, self._tokens = 0.0, 0, 0

    def start(self) -> None:
        """Mark the beginning of the first step. Later calls do nothing: a step begins when the last one ends."""
        if self._mark is None:
            self._mark = time.perf_counter()

    def count(self, tokens: int) -> None:
        """Add tokens that were trained on."""
        self._tokens += tokens

    def end_step(self) -> None:
        """Mark the end of a step."""
        self._steps += 1
        self._advance()

    def forget_pause(self) -> None:
        """Leave out the time since the last step: it belongs to no step."""
        self._mark = time.perf_counter()

    def leave_out(self, seconds: float) -> None:
        """Leave out a wait of ``seconds`` that has just ended, and keep the time before it."""
        if self._mark is not None:
            self._mark += seconds

    @property
    def seconds(self) -> float:
        """The seconds that the next :meth:`read` divides by."""
        self._advance()
        return self._seconds

    def read(self) -> dict[str, float]:
        """Seconds per step and tokens per second since the last call; resets the sums."""
        self._advance()
        seconds, steps, tokens = self._seconds, self._steps, self._tokens
        self._seconds, self._steps, self._tokens = 0.0, 0, 0
        return {"step_seconds": seconds / max(steps, 1), "tokens_per_second": tokens / max(seconds, 1e-9)}

    def _advance(self) -> None:
        now = time.perf_counter()
        self._seconds += now - (now if self._mark is None else self._mark)
        self._mark = now
