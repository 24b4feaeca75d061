"""Writes a run's files during training. Earlier results stay untouched until the first step is done."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from typing import Any

from transformers import SchedulerType, TrainerCallback, TrainerState, TrainingArguments

from veomni_core import Binding
from veomni_trainer.loop.trackers import Trackers
from veomni_trainer.output.folder import RunFolder
from veomni_trainer.output.metrics import Row, append_metrics, truncate_metrics
from veomni_trainer.report.progress import Progress
from veomni_trainer.report.write import RunEnding, write_report
from veomni_trainer.run.console import print_once
from veomni_transformers.whole_files import write_whole

_SECONDS_BETWEEN = 30.0
_LARGEST_SHARE = 0.02  # of the time that a run takes


class RunRecord(TrainerCallback):
    """Writes the run's files, shows its progress and hands rows on; of several processes, only the first one does."""

    def __init__(
        self,
        folder: RunFolder,
        binding: Binding,
        job_text: str,
        read: list[dict[str, Any]],
        resumed_from: int,
        progress: Progress,
        trackers: Trackers,
    ) -> None:
        self._folder, self._binding, self._job_text, self._read = folder, binding, job_text, read
        self._resumed_from, self._progress, self._trackers = resumed_from, progress, trackers
        self._live = LiveReport(folder)
        self._begun = self._warned = False

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **parts: Any) -> None:
        if self._resumed_from:
            print_once(f"in force from step {state.global_step + 1} on: {settings_in_force(parts['optimizer'], args)}")

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        if state.is_world_process_zero and not self._begun:
            self._begin()
            self._begun = True

    def on_row(self, row: Row) -> None:
        """Append one row to the metrics, and show it. The rows of each expert are too many for it: they go beside."""
        if (rows := row.pop("expert_rows", None)) is not None:
            append_metrics(self._folder.expert_rows, {"step": row["step"], "rows": rows})
        append_metrics(self._folder.metrics, row)
        if "bad" in row and not self._warned:
            self._warned = True
            print_once(f"warning: step {row['step']}: {row['bad']}. No checkpoint is written of such a step")
        self._progress.show(row)
        self._trackers.send(row)
        self._live.update(soon="validation_loss" in row)

    def end_with(self, error: BaseException) -> None:
        """Write a report of what there is before ``error`` ends the run."""
        if self._begun:
            what = (str(error).strip().splitlines() or [""])[0]
            with suppress(OSError):  # a full disk may be the error itself
                stopped = isinstance(error, KeyboardInterrupt)
                ending = RunEnding("interrupted") if stopped else RunEnding("failed", f"{type(error).__name__}: {what}")
                write_report(self._folder, ending)

    def _begin(self) -> None:
        self._folder.path.mkdir(parents=True, exist_ok=True)
        if self._resumed_from:
            for metrics in (self._folder.metrics, self._folder.expert_rows):
                truncate_metrics(metrics, self._resumed_from)
            self._folder.set_aside_after(self._resumed_from)
            self._folder.report.unlink(missing_ok=True)
        else:
            self._folder.clear()
        write_whole(self._folder.plan, self._binding.plan.to_json())
        write_whole(self._folder.receipt, self._binding.receipt.to_json())
        write_whole(self._folder.data, json.dumps(self._read, indent=1))
        write_whole(self._folder.job, self._job_text)


def settings_in_force(optimizer: Any, args: TrainingArguments) -> str:
    """The settings with which the next step changes the weights, as the optimizer has them.

    ``learning rate 9.8e-06 (highest 1e-05, cosine), weight_decay 0 and 0.1, betas (0.9, 0.999), ...``
    """
    groups = optimizer.param_groups
    rates = " and ".join(sorted({f"{group['lr']:.3g}" for group in groups}))
    highest = " and ".join(sorted({f"{group.get('initial_lr', group['lr']):.3g}" for group in groups}))
    schedule = SchedulerType(args.lr_scheduler_type).value
    said = [f"learning rate {rates} (highest {highest}, {schedule} over {args.max_steps} steps)"]
    for key in ("weight_decay", "betas", "eps", "momentum"):
        values = sorted({str(group[key]) for group in groups if key in group})
        said += [f"{key} {' and '.join(values)}"] if values else []
    return ", ".join([*said, f"max_grad_norm {args.max_grad_norm}"])


class LiveReport:
    """Writes a run's report at most every half minute, and at most a fiftieth of the time.

    Validations don't wait for the half minute.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._rested = time.monotonic()
        self._cost = 0.0

    def update(self, soon: bool) -> None:
        """Write the report if it is due.

        Args:
            soon: whether there is something new that is worth a report of its own.
        """
        began = time.monotonic()
        rest = self._cost / _LARGEST_SHARE
        if began - self._rested < (rest if soon and self._cost else max(rest, _SECONDS_BETWEEN)):
            return
        write_report(self._folder, RunEnding("running"))
        self._rested = time.monotonic()
        self._cost = self._rested - began
