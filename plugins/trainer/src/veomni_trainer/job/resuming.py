"""What each key of a job means for a run that is resumed, and which changes are refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from veomni_core.commands import load_yaml
from veomni_core.errors import CheckpointError, ConfigError, JobFileError
from veomni_trainer.job.precision import PRECISIONS
from veomni_trainer.job.schema import Job


class OnResume(StrEnum):
    """What a changed value does when a run is resumed."""

    APPLIED = "applied"
    """It is in force from the first step on that is trained now."""
    COMPARED = "compared"
    """It is applied where what the checkpoint says of its run still holds; otherwise the run is refused."""
    CONTINUED = "continued"
    """It has no effect: the checkpoint's value goes on."""
    REFUSED = "refused"
    """The run can't go on with another value."""


_APPLIED, _COMPARED, _CONTINUED, _REFUSED = OnResume

# A key, or a section whose keys are all alike.
KEYS: Mapping[str, OnResume] = {
    "model.config": _COMPARED,  # the checkpoint's weights must fit
    "model.weights": _CONTINUED,
    "model.revision": _REFUSED,
    "model.resize_embeddings": _COMPARED,  # the checkpoint's weights must fit
    "model.modeling": _COMPARED,  # the checkpoint's weights must fit, and the plan
    "model.dtype": _REFUSED,
    "model.ops_implementation": _COMPARED,  # the plan
    "model.trust_remote_code": _APPLIED,
    "data": _COMPARED,  # the sequences
    "lora": _COMPARED,  # the adapter
    "train.output_dir": _APPLIED,
    "train.steps": _APPLIED,
    "train.epochs": _APPLIED,
    "train.batch_size": _COMPARED,  # the sequences of a step, here and below
    "train.gradient_accumulation": _COMPARED,
    "train.learning_rate": _APPLIED,
    "train.optimizer": _REFUSED,
    "train.parameter_groups": _REFUSED,
    "train.freeze": _REFUSED,
    "train.schedule": _APPLIED,
    "train.schedule_options": _APPLIED,
    "train.early_stop": _APPLIED,
    "train.warmup": _APPLIED,
    "train.weight_decay": _APPLIED,
    "train.max_grad_norm": _APPLIED,
    "train.method": _REFUSED,
    "train.dpo": _APPLIED,
    "train.kto": _APPLIED,
    "train.orpo": _APPLIED,
    "train.grpo": _APPLIED,
    "train.rloo": _APPLIED,
    "train.reward": _APPLIED,
    "train.classify": _REFUSED,
    "train.parity": _APPLIED,
    "train.parity_limit": _APPLIED,
    "train.seed": _REFUSED,
    "train.device": _APPLIED,
    "train.precision": _REFUSED,  # unless the weights stay in their dtype
    "train.gradient_checkpointing": _APPLIED,
    "train.torch_compile": _APPLIED,
    "train.cuda_graphs": _APPLIED,
    "train.verify": _APPLIED,
    "train.shadow": _APPLIED,
    "train.frozen": _APPLIED,
    "train.log_every": _APPLIED,
    "train.validate_every": _APPLIED,
    "train.save_every": _APPLIED,
    "train.keep_checkpoints": _APPLIED,
    "train.on_bad_loss": _APPLIED,
    "train.export": _APPLIED,
    "train.push_to": _APPLIED,
    "train.expert_loads": _APPLIED,
    "train.profile": _APPLIED,
    "train.report_to": _APPLIED,
    "train.fsdp": _REFUSED,
    "train.sp_size": _COMPARED,
    "train.cp_size": _COMPARED,
    "train.sp_overlap": _APPLIED,
    "train.fsdp_size": _COMPARED,
    "train.tp_size": _COMPARED,
    "train.ep_size": _COMPARED,
    "train.parallel_plan": _APPLIED,
    "train.timeout": _APPLIED,
}

_WHY: Mapping[str, str] = {
    "model.dtype": "the optimizer's state is in the dtype of the weights",
    "model.revision": "another commit on the Hub may have other weights",
    "train.precision": "weights and the optimizer's state are in its dtype",
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
    def key(self) -> str:
        """The key of :data:`KEYS` that the path is under."""
        parts = self.path.split(".")
        prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
        return next(prefix for prefix in prefixes if prefix in KEYS)

    @property
    def on_resume(self) -> OnResume:
        """What becomes of the change."""
        if self.key == "train.precision":
            before, now = PRECISIONS.get(self.before), PRECISIONS.get(self.now)
            if before and now and before.weights == now.weights:
                return _COMPARED  # the plan
        return KEYS[self.key]

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
    refused = [change for change in changes if change.on_resume is OnResume.REFUSED]
    if refused:
        listed = "\n".join(f"  - {change} ({_WHY[change.key]})" for change in refused)
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
