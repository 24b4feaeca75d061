"""Sends the rows of metrics to TensorBoard, Weights & Biases and Trackio, through transformers' callbacks."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerState, TrainingArguments
from transformers.integrations.integration_utils import TensorBoardCallback, TrackioCallback, WandbCallback

from veomni_core.errors import HostError
from veomni_trainer.output.metrics import Row


def check_trackers(names: Sequence[str]) -> None:
    """Raise where a tracker's package is missing.

    Raises:
        HostError: naming the packages.
    """
    if missing := [name for name in names if importlib.util.find_spec(name) is None]:
        raise HostError(
            f"train.report_to: {', '.join(missing)} is not installed here. Install it with pip install "
            f"'veomni-trainer[{','.join(missing)}]', or remove it from train.report_to"
        )


class Trackers(TrainerCallback):
    """Hands each row to transformers' callbacks, which are made after the first step: a failed start writes nothing.

    ``Trainer`` calls them with means over several steps, so they are not among its own callbacks.

    Args:
        names: of the trackers.
        folder: the run's folder; TensorBoard's events go into ``tensorboard`` in it.
        resumed_from: TensorBoard drops what an earlier run wrote after this step.
    """

    def __init__(self, names: Sequence[str], folder: Path, resumed_from: int) -> None:
        check_trackers(names)
        self._names, self._folder, self._resumed_from = names, folder, resumed_from
        self._callbacks: list[TrainerCallback] = []
        self._now: tuple[Any, ...] = ()
        self._model: Any = None

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: Any, model: Any = None, **_: Any
    ) -> None:
        if not state.is_world_process_zero or not self._names:
            return
        self._now, self._model = (args, state, control), model
        if not self._callbacks:
            args.run_name = args.run_name or self._folder.name
            self._callbacks = [self._make(name) for name in self._names]
            for callback in self._callbacks:
                callback.on_train_begin(*self._now, model=model)

    def send(self, row: Row) -> None:
        """Send the numbers of a row, as values of its step."""
        logs = {key: value for key, value in row.items() if key != "step" and isinstance(value, (int, float))}
        if "validation_loss" in logs:
            logs = {"eval_loss": logs["validation_loss"]}  # transformers puts it under eval/
        for callback in self._callbacks:
            callback.on_log(*self._now, model=self._model, logs=logs)

    def close(self) -> None:
        """Finish the files and connections."""
        for callback in self._callbacks:
            callback.on_train_end(*self._now, model=self._model)
        self._callbacks = []

    def _make(self, name: str) -> TrainerCallback:
        if name != "tensorboard":
            return {"wandb": WandbCallback, "trackio": TrackioCallback}[name]()
        from torch.utils.tensorboard import SummaryWriter

        purge = self._resumed_from + 1 if self._resumed_from else None
        return TensorBoardCallback(SummaryWriter(str(self._folder / "tensorboard"), purge_step=purge))
