"""The trainer of each method, imported when it is needed."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

from veomni_trainer.loop.trainer import JobTrainer

_TRAINERS: Mapping[str, tuple[str, str]] = {
    "sft": ("trl_trainers", "SftTrainer"),
    "dpo": ("trl_trainers", "DpoTrainer"),
    "kto": ("trl_trainers", "KtoTrainer"),
    "orpo": ("orpo_trainer", "OrpoTrainer"),
    "grpo": ("trl_trainers", "GrpoTrainer"),
    "rloo": ("trl_trainers", "RlooTrainer"),
    "reward": ("trl_trainers", "RewardTrainer"),
    "classify": ("classify_trainer", "ClassifyTrainer"),
}


def trainer_of(method: str) -> type[JobTrainer]:
    """The class for ``train.method``, which takes its inputs beside what :class:`JobTrainer` takes."""
    module, name = _TRAINERS[method]
    found: type[JobTrainer] = getattr(import_module(f"veomni_trainer.loop.{module}"), name)
    return found
