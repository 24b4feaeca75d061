"""Finds steps whose loss or gradient norm is not finite, and ends training there, or goes on, as the job says."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from veomni_trainer.job.train_section import TrainSection


class BadSteps(TrainerCallback):
    """Looks at every step, whether it is logged or not. All ranks find the same steps.

    No checkpoint is written of a bad step: its weights may be lost, and the last ones of the run that are not would
    be dropped in time. It comes after the callback that asks for checkpoints.

    Args:
        train: what the job says.
        loss_scale: what losses are multiplied by; ``None`` where they are not scaled. It falls after a step whose
            gradients overflowed. The optimizer has left that step out, so its norm is no problem. (accelerate's
            ``optimizer_step_was_skipped`` doesn't see it of a fused optimizer, which is called and skips by itself.)

    Attributes:
        problem: what is bad about the step that has ended, e.g. ``the loss is nan``; otherwise empty.
        first: the first bad step, and its problem.
    """

    def __init__(self, train: TrainSection, loss_scale: Callable[[], float | None]) -> None:
        self._stops, self._loss_scale = train.on_bad_loss == "stop", loss_scale
        self.problem = ""
        self.first: tuple[int, str] | None = None
        self._losses: list[Tensor] = []
        self._norm: Tensor | float | None = None
        self._scale_before: float | None = None

    def start_step(self) -> None:
        """Forget the losses and the norm of the previous step."""
        self._losses = []
        self._norm = None
        self._scale_before = self._loss_scale()

    def look_at_loss(self, loss: Tensor) -> None:
        """Take the loss of a micro-step."""
        self._losses.append(loss.detach())

    def look_at_norm(self, norm: Tensor | float) -> None:
        """Take the norm of the step's gradients, as it was before they were clipped."""
        self._norm = norm.full_tensor() if isinstance(norm, DTensor) else norm

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        self.problem = self._find(args)
        if self.problem:
            self.first = self.first or (state.global_step, self.problem)
            control.should_save = False
            control.should_log = True
            if self._stops:
                control.should_training_stop = True
                control.should_evaluate = False
        return control

    def _find(self, args: TrainingArguments) -> str:
        """The step's problem. The sum over ranks is not finite where a rank's value isn't."""
        loss = torch.stack(self._losses).sum().float()
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
