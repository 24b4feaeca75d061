"""Trains the same job all-eager in a separate process, and compares the two runs."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import Any

from veomni_trainer.metrics import Row, figures, training_rows
from veomni_trainer.run_folder import RunFolder
from veomni_trainer.signals import receiving

ALL_EAGER = "{preset: eager}"


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


def train_eager(folder: RunFolder, accept_plan_change: bool) -> int:
    """Run ``folder``'s job with everything eager into ``folder/eager``; returns the process's exit code.

    In a separate process, the allocator, the peak memory and the compiled code of this run don't affect the eager one.
    An eager run that was interrupted before is resumed.
    """
    eager = folder.compared("eager")
    command = [sys.executable, "-m", "veomni_core.cli", "train", str(folder.job)]
    command += ["--set", f"model.ops_implementation={ALL_EAGER}"]
    command += ["--set", f"train.output_dir={json.dumps(str(eager.path))}"]
    command += ["--resume"] if eager.checkpoints() else ["--overwrite"]
    command += ["--accept-plan-change"] if accept_plan_change else []
    # In its own process group, the child doesn't get the terminal's Ctrl-C. This process forwards each signal, once.
    child = subprocess.Popen(command, process_group=0)
    with receiving(lambda number, _: child.send_signal(number)):
        return child.wait()


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
