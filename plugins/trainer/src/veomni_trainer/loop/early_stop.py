"""Ends training where the validation loss no longer improves, also across an interrupt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import EarlyStoppingCallback, TrainerControl, TrainerState

from veomni_core.errors import CheckpointError
from veomni_trainer.job.train_section import TrainSection

_COUNTER = "early_stopping_patience_counter"


class EarlyStop(EarlyStoppingCallback):
    """transformers' callback, for validations that a job's own keys trigger.

    ``Trainer`` keeps the best loss in its state, and writes this callback's counter beside it into each checkpoint.
    """

    def __init__(self, train: TrainSection) -> None:
        assert train.early_stop is not None
        super().__init__(train.early_stop.patience, train.early_stop.min_improvement)
        self._saves = train.save_every != "never"

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Take over the counter of the checkpoint that is resumed."""
        self.early_stopping_patience_counter = _counter(state.stateful_callbacks)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # type: ignore[override]
        super().on_evaluate(args, state, control, **kwargs)
        if control.should_training_stop and self._saves:
            control.should_save = True


def has_stopped(checkpoint: Path, train: TrainSection) -> bool:
    """Whether the training that wrote ``checkpoint`` ended there early, and would end there for this job too.

    Raises:
        CheckpointError: the checkpoint's state can't be read.
    """
    if train.early_stop is None:
        return False
    path = checkpoint / "trainer_state.json"
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        return _counter(state.get("stateful_callbacks")) >= train.early_stop.patience
    except (OSError, ValueError, AttributeError, TypeError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{path} can't be read: {error}") from error


def _counter(callbacks: Any) -> int:
    stored = callbacks.get(EarlyStop.__name__, {}) if isinstance(callbacks, dict) else {}
    return int(stored.get("attributes", {}).get(_COUNTER, 0))
