"""The values of a run over its steps, as a chart shows them: a line, smoothed where there are many."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from veomni_trainer.output.metrics import Row, training_rows

MANY_STEPS = 200  # a line of more steps is drawn faintly, with a smoothed one on it
Value = Callable[[Row], float]
Points = list[tuple[int, float]]


@dataclass(frozen=True)
class Series:
    """A run in the charts: its name, the page's variable with its colour, and its rows of metrics."""

    label: str
    colour: str
    rows: list[Row]

    def points(self, value: Value, key: str = "") -> Points:
        """Step and value of each training row that has ``key``."""
        return [(row["step"], float(value(row))) for row in training_rows(self.rows) if not key or key in row]

    def validation(self) -> Points:
        """Step and loss of each validation."""
        return [(row["step"], row["validation_loss"]) for row in self.rows if "validation_loss" in row]


def smoothed(points: Points) -> Points:
    """The exponential moving average over about a fiftieth of ``points``; values that are not finite are left out.

    Example:
        >>> smoothed([(step, 2.0) for step in range(3)])
        [(0, 2.0), (1, 2.0), (2, 2.0)]
    """
    keep = 1 - 1 / max(len(points) / 50, 1)
    total = weight = 0.0
    line = []
    for step, value in points:
        if math.isfinite(value):
            total, weight = keep * total + value, keep * weight + 1
            line.append((step, total / weight))
    return line


def in_words(label: str, points: Points) -> str:
    """What a line shows: ``this job from 3 at step 1 to 0.15 at step 20, between 0.15 and 3``."""
    finite = [value for _, value in points if math.isfinite(value)]
    if not finite:
        return f"{label} without a finite value"
    (first, start), (last, end) = points[0], points[-1]
    between = f"between {min(finite):.4g} and {max(finite):.4g}"
    return f"{label} from {start:.4g} at step {first} to {end:.4g} at step {last}, {between}"
