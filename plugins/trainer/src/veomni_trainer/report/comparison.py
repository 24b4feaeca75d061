"""Compares a run with the all-eager run of the same job: speed, memory, and where and why losses part."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from veomni_trainer.output.metrics import Row, figures, quartiles, steady, training_rows

# Relative differences of losses that rounding explains, by the type in which the model computes. A loss is a mean of
# many float32 values, so in float32 it is a few hundred of its epsilons, in the others about one.
ROUNDING = {"float32": 1e-5, "bfloat16": 8e-3, "float16": 1e-3}


@dataclass(frozen=True)
class Comparison:
    """A run compared with the all-eager run of the same seed and data; ratios above 1 mean that this run is better.

    Attributes:
        steps: how many steps both runs have.
        largest_loss_difference: absolute, with its step in ``at_step``.
        largest_relative_difference: of the losses.
        rounding: the relative difference that rounding explains.
        beyond_rounding_at: the first step with a larger one; 0 if there is none.
        first_flip_at: the first step in which the routers chose otherwise; 0 if there is none, or none was counted.
        speed_ratio: the median over the steps of eager's time by this run's time of the same step.
        speed_quartiles: the quartiles of the same ratios.
        memory_ratio: of the peaks.
    """

    steps: int
    largest_loss_difference: float
    at_step: int
    largest_relative_difference: float
    rounding: float
    beyond_rounding_at: int
    first_flip_at: int
    speed_ratio: float
    speed_quartiles: tuple[float, float]
    memory_ratio: float


def compare_rows(
    rows: list[Row],
    eager_rows: list[Row],
    loads: list[Row] | None = None,
    eager_loads: list[Row] | None = None,
    dtype: str = "float32",
) -> Comparison | None:
    """The comparison, or ``None`` if the two runs have no step in common.

    Args:
        rows: of ``metrics.jsonl``.
        eager_rows: the same of the eager run.
        loads: of ``expert_rows.jsonl``; each step's counts change when a router's choice flips.
        eager_loads: the same of the eager run.
        dtype: the type in which the model computes.
    """
    eager = {row["step"]: row for row in training_rows(eager_rows)}
    common = [row for row in training_rows(rows) if row["step"] in eager]
    if not common:
        return None
    differences = {row["step"]: abs(row["loss"] - eager[row["step"]]["loss"]) for row in common}
    relative = {step: gap / max(abs(eager[step]["loss"]), 1e-12) for step, gap in differences.items()}
    worst = _largest(differences)
    rounding = ROUNDING.get(dtype, ROUNDING["float32"])
    ratios = [eager[row["step"]]["step_seconds"] / row["step_seconds"] for row in steady(common)]
    counted = {row["step"]: row["rows"] for row in eager_loads or ()}
    flips = (row["step"] for row in loads or () if counted.get(row["step"], row["rows"]) != row["rows"])
    mine, theirs = figures(rows), figures(eager_rows)
    return Comparison(
        steps=len(common),
        largest_loss_difference=differences[worst],
        at_step=worst,
        largest_relative_difference=relative[_largest(relative)],
        rounding=rounding,
        beyond_rounding_at=next((step for step, gap in relative.items() if not gap <= rounding), 0),
        first_flip_at=next(flips, 0),
        speed_ratio=statistics.median(ratios),
        speed_quartiles=quartiles(ratios),
        memory_ratio=theirs["peak_memory_bytes"] / mine["peak_memory_bytes"],
    )


def comparison_sentence(comparison: Comparison) -> str:
    """``Against eager: largest loss difference 1.2e-06 (at step 14, of 60 compared), 1.31 x its speed, ...``"""
    low, high = comparison.speed_quartiles
    return (
        f"Against eager: largest loss difference {comparison.largest_loss_difference:.2g} (at step "
        f"{comparison.at_step}, of {comparison.steps} compared), {comparison.speed_ratio:.2f} x its speed (half of the "
        f"steps: {low:.2f} to {high:.2f}), {1 / comparison.memory_ratio:.2f} x its peak memory. {_explain(comparison)}"
    )


def _explain(comparison: Comparison) -> str:
    """Until when the losses are equal to rounding, and what happens then."""
    flip, beyond = comparison.first_flip_at, comparison.beyond_rounding_at
    largest = f"largest relative difference {comparison.largest_relative_difference:.2g}"
    if flip and (not beyond or flip <= beyond):
        return f"Losses are equal to rounding until step {flip}, where a router's choice first flips ({largest})."
    if not beyond:
        return f"Losses are equal to rounding in all {comparison.steps} steps ({largest})."
    later = f" A router's choice first flips at step {flip}." if flip else ""
    return (
        f"Losses are equal to rounding until step {beyond}, where their relative difference first exceeds "
        f"{comparison.rounding:g} ({largest}).{later}"
    )


def _largest(differences: dict[int, float]) -> int:
    """The step of the largest difference; NaN counts as the largest."""
    return max(differences, key=lambda step: (math.isnan(differences[step]), differences[step]))
