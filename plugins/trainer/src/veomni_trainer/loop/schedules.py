"""The learning-rate schedules that a job can name: transformers' own."""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch

from veomni_core.errors import ConfigError, UnknownNameError, did_you_mean
from veomni_trainer.job.train_section import TrainSection

_NOT_OPTIONS = {"optimizer", "num_warmup_steps", "num_training_steps", "last_epoch"}
_WITHOUT_OPTIONS = ("constant", "cosine", "linear")  # made with none, and always there
_BY_VALIDATION = ("reduce_lr_on_plateau", "greedy")


def schedule_names() -> list[str]:
    """Every name that ``train.schedule`` takes."""
    from transformers import SchedulerType

    return sorted(kind.value for kind in SchedulerType if kind.value not in _BY_VALIDATION)


def check_schedule(train: TrainSection) -> None:
    """Check that the job's schedule exists and can be made with its options.

    Raises:
        ConfigError: there is no such schedule or option, or an option is missing or has a wrong value.
    """
    # Known without transformers' optimization, which imports PEFT: seconds that `veomni plan` needn't spend.
    if train.schedule in _WITHOUT_OPTIONS and not train.schedule_options:
        return
    if train.schedule in _BY_VALIDATION:
        raise ConfigError(
            f"train.schedule: {train.schedule} goes by the validation loss instead of the steps, and `veomni train` "
            "has only schedules that go by the steps. Write another one, such as cosine, and train.early_stop"
        )
    if train.schedule not in schedule_names():
        raise UnknownNameError(
            f"train.schedule: {train.schedule!r} is unknown. {did_you_mean(train.schedule, schedule_names())}"
        )
    from transformers import SchedulerType, get_scheduler
    from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION

    kind = SchedulerType(train.scheduler_type)
    schedule: Any = TYPE_TO_SCHEDULER_FUNCTION[kind]
    known = {*inspect.signature(schedule).parameters} - _NOT_OPTIONS
    for option in train.schedule_options:
        if option not in known:
            raise UnknownNameError(
                f"train.schedule_options.{option}: {train.schedule} has no such option. {did_you_mean(option, known)}"
            )
    steps = train.steps or 100  # of a job in epochs, not known yet
    warmup = train.warmup if train.warmup >= 1 else math.ceil(steps * train.warmup)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=train.learning_rate)
    try:
        get_scheduler(kind, optimizer, int(warmup), steps, train.schedule_options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"train.schedule_options: {train.schedule} can't be made of them: {error}") from error
