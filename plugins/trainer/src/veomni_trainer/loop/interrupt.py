"""On Ctrl-C or SIGTERM, finishes the current step, writes a checkpoint and ends training."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

import torch
from torch import distributed
from transformers import TrainerCallback, TrainerControl, TrainingArguments

from veomni_trainer.loop.signals import receiving


class InterruptCallback(TrainerCallback):
    """Stops training at the end of the step in which a signal arrives; a second signal stops it immediately."""

    def __init__(self) -> None:
        self.requested = False
        self.interrupted = False

    def listening(self) -> AbstractContextManager[None]:
        """Handle the signals while training runs."""
        return receiving(self._receive)

    def request(self) -> None:
        """End training after the step that runs, as a signal does."""
        self.requested = True

    def on_step_end(self, args: TrainingArguments, state: Any, control: TrainerControl, **_: Any) -> None:
        if not control.should_training_stop and self._requested_anywhere(args):
            self.interrupted = True
            control.should_save = True
            control.should_training_stop = True

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        if os.environ.get("RANK", "0") == "0":  # not by print, which may be what was interrupted
            os.write(2, b"\nInterrupted: ends after this step, with a checkpoint. Again: stops at once, without one.\n")

    def _requested_anywhere(self, args: TrainingArguments) -> bool:
        """Whether any process received a signal: all processes must stop after the same step."""
        if args.world_size == 1:
            return self.requested
        flag = torch.tensor(int(self.requested), device=args.device)
        distributed.all_reduce(flag, distributed.ReduceOp.MAX)
        return bool(flag.item())
