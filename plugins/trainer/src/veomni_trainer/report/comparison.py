"""Compares a run with the all-eager run of the same job."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from veomni_trainer.output.metrics import Row, figures, training_rows


@dataclass(frozen=True)
class Comparison:
    """A run compared with the all-eager run of the same seed and data; ratios above 1 mean that this run is better."""

    steps: int
    largest_loss_difference: float
    at_step: int
    speed_ratio: float
    memory_ratio: float

    def to_dict(self) -> dict[str, Any]:
        """The fields as a dictionary."""
        return asdict(self)


def compare_rows(rows: list[Row], eager_rows: list[Row]) -> Comparison | None:
    """The comparison, or ``None`` if the two runs have no step in common."""
    losses = {row["step"]: row["loss"] for row in training_rows(rows)}
    eager = {row["step"]: row["loss"] for row in training_rows(eager_rows)}
    differences = {step: abs(loss - eager[step]) for step, loss in losses.items() if step in eager}
    if not differences:
        return None
    # A NaN difference counts as the largest.
    worst = max(differences, key=lambda step: (differences[step] != differences[step], differences[step]))
    mine, theirs = figures(rows), figures(eager_rows)
    return Comparison(
        steps=len(differences),
        largest_loss_difference=differences[worst],
        at_step=worst,
        speed_ratio=theirs["step_seconds"] / mine["step_seconds"],
        memory_ratio=theirs["peak_memory_bytes"] / mine["peak_memory_bytes"],
    )
