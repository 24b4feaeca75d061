"""How far a run came, and what ended it: the key ``ending`` of ``summary.json``, and the banner of the report."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

State = Literal["running", "complete", "interrupted", "diverged", "failed", "unfinished"]


@dataclass(frozen=True)
class RunEnding:
    """What ended a run.

    Attributes:
        state: ``unfinished`` is a run that was killed, or that still runs: its files don't say which.
        reason: what a diverged or failed run ended with.
        step: the last step with a row of metrics.
        steps: how many steps the job has.
    """

    state: State
    reason: str = ""
    step: int = 0
    steps: int = 0

    def to_dict(self) -> dict[str, Any]:
        """The fields as a dictionary."""
        return asdict(self)

    @property
    def banner(self) -> str:
        """What the report says on top; empty for a complete run."""
        where = f"step {self.step} of {self.steps}"
        return {
            "complete": "",
            "running": f"Written while the job runs, at {where}.",
            "interrupted": f"Interrupted after {where}. Continue it with --resume.",
            "diverged": f"Training ended at {where} with a loss or gradient that is not finite: {self.reason}.",
            "failed": f"Training ended with an error after {where}: {self.reason}",
            "unfinished": f"Not finished: the last row is that of {where}. The job was killed, or still runs.",
        }[self.state]
