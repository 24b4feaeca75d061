"""Trains the same job all-eager, in a separate process: beside this one's training, turn by turn, or after it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainingArguments

from veomni_trainer.loop.measures import wait_for
from veomni_trainer.output.folder import RunFolder
from veomni_trainer.run.terminal import receiving

EAGER = "eager"  # the name of the run, and of its folder
_STANDARD_ERROR = 2  # its file descriptor
_STEP_DONE, _ALL_DONE = b".", b"!"


class AlternatingSteps(TrainerCallback):
    """Lets a step begin when the other process has ended its own: what else the machine does hits both trainings alike.

    Validation and checkpoints belong to the turn.

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


@dataclass(frozen=True)
class EagerRun:
    """What the process of the eager run gets.

    Attributes:
        job: the file of the job that it is compared with.
        folder: its own output folder.
        resume: whether it goes on from its last checkpoint.
        accept_plan_change: whether it may go on with other kernels.
        turns: the file descriptors by which it takes turns: where it receives, and where it sends.
    """

    job: str
    folder: str
    resume: bool
    accept_plan_change: bool
    turns: tuple[int, int] | None = None

    def start(self) -> subprocess.Popen[bytes]:
        """Start the process.

        There the allocator, the peak memory and the compiled code of this run don't affect it. In its own process
        group, it doesn't get the terminal's Ctrl-C.
        """
        command = [sys.executable, "-m", "veomni_trainer.run.eager_process", json.dumps(asdict(self))]
        # Where this process prints to standard error (under --json), so does the child.
        output = _STANDARD_ERROR if sys.stdout is sys.stderr else None
        if self.turns:  # two runs can't show their progress on one terminal
            output = subprocess.DEVNULL
        return subprocess.Popen(command, process_group=0, pass_fds=self.turns or (), stdout=output)


@contextlib.contextmanager
def eager_beside(
    job_text: str, folder: RunFolder, resume: bool, accept_plan_change: bool
) -> Iterator[tuple[AlternatingSteps, Callable[[bool], int]]]:
    """Start the eager run of a job, which waits for its turn. If this process's training fails, the eager run ends.

    Gives this process's turns, and what ends these and waits for the eager run; that takes whether the run shall end
    like this process's training, with a checkpoint after the same step, and returns its exit code.
    """
    eager = folder.compared(EAGER)
    received, sends = os.pipe()
    hears, sent = os.pipe()
    with tempfile.TemporaryDirectory() as temporary:
        job = Path(temporary) / "job.yaml"
        job.write_text(job_text, encoding="utf-8")
        resume = resume and bool(eager.checkpoints())
        child = EagerRun(str(job), str(eager.path), resume, accept_plan_change, (received, sent)).start()
        os.close(received)
        os.close(sent)
        turns = AlternatingSteps(hears, sends, first=True)

        def wait(stop: bool) -> int:
            with receiving(lambda number, _: child.send_signal(number)):
                if stop and child.poll() is None:
                    child.send_signal(signal.SIGINT)
                turns.end()
                return child.wait()

        try:
            yield turns, wait
        except BaseException:
            wait(True)
            raise
        finally:
            wait(False)


def train_eager(folder: RunFolder, accept_plan_change: bool) -> int:
    """Run ``folder``'s job with everything eager into ``folder/eager``; returns the process's exit code.

    An eager run that was interrupted before is resumed.
    """
    eager = folder.compared(EAGER)
    child = EagerRun(str(folder.job), str(eager.path), bool(eager.checkpoints()), accept_plan_change).start()
    with receiving(lambda number, _: child.send_signal(number)):  # each signal is forwarded once
        return child.wait()
