"""What ends training before its last step: a step that is not finite, or a validation loss that no longer improves."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.tensor import DTensor
from transformers import EarlyStoppingCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from veomni_core.errors import CheckpointError
from veomni_trainer.job.train_section import TrainSection

_COUNTER = "early_stopping_patience_counter"


class BadSteps(TrainerCallback):
    """Looks at the loss and the gradient norm of every step, whether it is logged or not, as all ranks do.

    No checkpoint is written of a bad step: its weights may be lost, and the last ones of the run that are not would
    be dropped in time. It comes after the callback that asks for checkpoints.

    Args:
        train: what the job says.
        loss_scale: what losses are multiplied by; ``None`` where they are not scaled. It falls after a step whose
            gradients overflowed. The optimizer has left that step out, so its norm is no problem. (accelerate's
            ``optimizer_step_was_skipped`` doesn't see it of a fused optimizer, which is called and skips by itself.)

    Attributes:
        losses: of the step's micro-steps.
        problem: what is bad about the step that has ended, e.g. ``the loss is nan``; otherwise empty.
    """

    def __init__(self, train: TrainSection, loss_scale: Callable[[], float | None]) -> None:
        self._stops, self._loss_scale = train.on_bad_loss == "stop", loss_scale
        self.problem = ""
        self.losses: list[Tensor] = []
        self._norm: Tensor | float | None = None
        self._scale_before: float | None = None

    def start_step(self) -> None:
        """Forget the losses and the norm of the previous step."""
        self.losses = []
        self._norm = None
        self._scale_before = self._loss_scale()

    def look_at_loss(self, loss: Tensor) -> None:
        """Take the loss of a micro-step."""
        self.losses.append(loss.detach())

    def look_at_norm(self, norm: Tensor | float) -> None:
        """Take the norm of the step's gradients, as it was before they were clipped."""
        self._norm = norm.full_tensor() if isinstance(norm, DTensor) else norm

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        self.problem = self._find(args)
        if self.problem:
            control.should_save = False
            control.should_log = True
            if self._stops:
                control.should_training_stop = True
                control.should_evaluate = False
        return control

    def _find(self, args: TrainingArguments) -> str:
        """The step's problem. The sum over ranks is not finite where a rank's value isn't."""
        loss = torch.stack(self.losses).sum().float()
        seen = None if self._overflowed() else self._norm
        norm = torch.as_tensor(0.0 if seen is None else seen, dtype=loss.dtype, device=loss.device)
        values = torch.stack([loss, norm])
        if args.world_size > 1:
            distributed.all_reduce(values)
        for name, value in zip(("loss", "gradient norm"), values.tolist(), strict=True):
            if not math.isfinite(value):
                return f"the {name} is {value}"
        return ""

    def _overflowed(self) -> bool:
        before, after = self._scale_before, self._loss_scale()
        return before is not None and after is not None and after < before


class EarlyStop(EarlyStoppingCallback):
    """transformers' callback, for validations that a job's own keys trigger; it goes on after an interrupt.

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
