"""What each key of a job means for a run that is resumed, and which changes are refused.

Another value of any other key is in force from the next step on. Of the model, the data, the adapter and the sizes it
is compared with the checkpoint, whose weights, plan, sequences and sequences of a step must still fit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from veomni_core.commands import load_yaml
from veomni_core.errors import CheckpointError, ConfigError, JobFileError
from veomni_trainer.job.precision import PRECISIONS
from veomni_trainer.job.schema import Job

WITHOUT_EFFECT = "model.weights"  # those of the checkpoint go on, unless Job.reads_weights_again
REFUSED: Mapping[str, str] = {  # why a run can't go on with another value of a key, or of a section
    "model.dtype": "the optimizer's state is in the dtype of the weights",
    "model.revision": "another commit on the Hub may have other weights",
    "lora.quantization": "the adapter was trained over weights that were held so",
    "train.precision": "weights and the optimizer's state are in its dtype",  # unless the weights stay in their dtype
    "train.optimizer": "the optimizer's state is of its kind",
    "train.parameter_groups": "the optimizer's state is stored group by group",
    "train.freeze": "the optimizer has a state of what is trained alone",
    "train.method": "another method learns from other data",
    "train.classify": "the model's scores are those of its labels",
    "train.seed": "another seed draws another order of sequences, so some would be trained on twice and some never",
    "train.fsdp": "weights and optimizer are stored otherwise with and without it",
}


@dataclass(frozen=True)
class ChangedKey:
    """A key with another value than in the job that wrote the checkpoint."""

    path: str
    before: Any
    now: Any

    @property
    def why_refused(self) -> str:
        """Why a run can't go on with it; empty if it can."""
        if self.path == "train.precision":
            before, now = PRECISIONS.get(self.before), PRECISIONS.get(self.now)
            if before and now and before.weights == now.weights:
                return ""  # the plan is compared
        return next((why for key, why in REFUSED.items() if f"{self.path}.".startswith(f"{key}.")), "")

    def __str__(self) -> str:
        return f"{self.path}: {self.before} -> {self.now}"


def changed_keys(checkpoint: Path, job: Job) -> list[ChangedKey]:
    """How ``job`` differs from the job that wrote ``checkpoint``.

    Raises:
        CheckpointError: the checkpoint's job can't be read.
    """
    try:
        old = flat_keys(load_yaml(checkpoint / "job.yaml"))
    except JobFileError as error:
        raise CheckpointError(f"{checkpoint} does not say which job wrote it: {error}") from error
    new = flat_keys(job.model_dump(exclude_none=True))
    return [
        ChangedKey(key, old.get(key, "not there"), new.get(key, "not there"))
        for key in dict.fromkeys([*old, *new])
        if old.get(key) != new.get(key)
    ]


def refuse_changes(checkpoint: Path, changes: list[ChangedKey]) -> None:
    """Raise ConfigError if one of ``changes`` can't be made to a run that is resumed."""
    if refused := [change for change in changes if change.why_refused]:
        listed = "\n".join(f"  - {change} ({change.why_refused})" for change in refused)
        raise ConfigError(
            f"--resume: a run can't go on with another value of these keys than {checkpoint} was trained with:\n"
            f"{listed}\nRestore them, or start a new run from its weights, with model.weights: {checkpoint}"
        )


def flat_keys(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of a job by their dotted paths."""
    flat: dict[str, Any] = {}
    for key, value in data.items():
        flat |= flat_keys(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat
