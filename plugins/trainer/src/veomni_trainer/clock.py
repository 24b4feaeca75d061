"""How long steps take, without the pauses in which checkpoints are written or the model is validated."""

from __future__ import annotations

import time


class StepClock:
    """Adds up seconds, steps and tokens between two readings."""

    def __init__(self) -> None:
        self._mark: float | None = None
        self._seconds, self._steps, self._tokens = 0.0, 0, 0

    def start(self) -> None:
        """A step begins; only the first call matters, as later steps begin where the one before ends."""
        if self._mark is None:
            self._mark = time.perf_counter()

    def count(self, tokens: int) -> None:
        """Some tokens were trained on."""
        self._tokens += tokens

    def end_step(self) -> None:
        """A step is done."""
        self._steps += 1
        self._advance()

    def forget_pause(self) -> None:
        """What happened since the last step belongs to no step."""
        self._mark = time.perf_counter()

    def read(self) -> dict[str, float]:
        """Seconds per step and tokens per second since the last reading, which begins anew."""
        self._advance()
        seconds, steps, tokens = self._seconds, self._steps, self._tokens
        self._seconds, self._steps, self._tokens = 0.0, 0, 0
        return {"step_seconds": seconds / max(steps, 1), "tokens_per_second": tokens / max(seconds, 1e-9)}

    def _advance(self) -> None:
        now = time.perf_counter()
        self._seconds += now - (now if self._mark is None else self._mark)
        self._mark = now
