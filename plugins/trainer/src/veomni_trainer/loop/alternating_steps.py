"""Two trainings that take turns, step by step: what else the machine does hits both alike."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback, TrainingArguments

from veomni_trainer.loop.measures import wait_for

_STEP_DONE, _ALL_DONE = b".", b"!"


class AlternatingSteps(TrainerCallback):
    """Lets a step begin when the other process has ended its own. Validation and checkpoints belong to the turn.

    Args:
        receiving: the file descriptor at which the other process says that it has done a step.
        sending: the one at which this process says so.
        first: whether this process does the first step.

    Attributes:
        on_wait: called with the seconds of each wait.
        first: whether this process does the first step.
        on_lost: called where the other process ends without having said that it has done its last step.
    """

    def __init__(self, receiving: int, sending: int, first: bool) -> None:
        self._receiving, self._sending, self.first = receiving, sending, first
        self._began = self._alone = self._closed = False
        self.on_wait: Callable[[float], None] = lambda seconds: None
        self.on_lost: Callable[[], None] = lambda: None

    def on_step_begin(self, args: TrainingArguments, *_: Any, **__: Any) -> None:
        if self._alone:
            return
        wait_for(args.device)  # its work belongs to this process's last step
        began = time.perf_counter()
        if self._began:
            self._say(_STEP_DONE)
        if self._began or not self.first:
            self._listen()
        self._began = True
        self.on_wait(time.perf_counter() - began)

    def end(self) -> None:
        """Let the other process go on alone."""
        if not self._closed:
            self._closed = self._alone = True
            self._say(_ALL_DONE)
            os.close(self._receiving)
            os.close(self._sending)

    def _say(self, what: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):  # the other process has ended, which _listen will find
            os.write(self._sending, what)

    def _listen(self) -> None:
        heard = os.read(self._receiving, 1)
        if heard != _STEP_DONE:
            self._alone = True
        if not heard:
            self.on_lost()
