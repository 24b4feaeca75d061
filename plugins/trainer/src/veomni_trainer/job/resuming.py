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


_WHY: Mapping[str, str] = {  # why a run can't go on with another value of a key
    "model.dtype": "the optimizer's state is in the dtype of the weights",
    "model.revision": "another commit on the Hub may have other weights",
    "train.precision": "weights and the optimizer's state are in its dtype",  # unless the weights stay in their dtype
    "train.optimizer": "the optimizer's state is of its kind",
    "train.parameter_groups": "the optimizer's state is stored group by group",
    "train.freeze": "the optimizer has a state of what is trained alone",
    "train.method": "another method learns from other data",
    "train.classify": "the model's scores are those of its labels",
    "train.seed": "another seed draws another order of sequences, so some would be trained on twice and some never",
    "train.fsdp": "weights and optimizer are stored otherwise with and without it",
}
_COMPARED_WITH = {  # keys by what of the checkpoint must still hold
    "its weights, which must fit": "model.config model.resize_embeddings model.modeling",
    "its plan": "model.ops_implementation",
    "its sequences": "data",
    "its adapter": "lora",
    "the sequences of a step": "train.batch_size train.gradient_accumulation train.sp_size train.cp_size "
    "train.fsdp_size train.tp_size train.ep_size",
}
_APPLIED_KEYS = (  # of the section train
    "output_dir steps epochs learning_rate schedule schedule_options early_stop warmup weight_decay max_grad_norm dpo "
    "kto orpo grpo rloo reward parity parity_limit device gradient_checkpointing torch_compile cuda_graphs verify "
    "shadow frozen log_every validate_every save_every keep_checkpoints on_bad_loss export push_to expert_loads "
    "profile report_to sp_overlap parallel_plan timeout"
)
# A key, or a section whose keys are all alike.
KEYS: Mapping[str, OnResume] = {
    **dict.fromkeys(_WHY, OnResume.REFUSED),
    **{key: OnResume.COMPARED for keys in _COMPARED_WITH.values() for key in keys.split()},
    **{f"train.{key}": OnResume.APPLIED for key in _APPLIED_KEYS.split()},
    "model.trust_remote_code": OnResume.APPLIED,
    "model.weights": OnResume.CONTINUED,
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
                return OnResume.COMPARED  # the plan
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
