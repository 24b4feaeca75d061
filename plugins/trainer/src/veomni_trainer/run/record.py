"""Writes a run's files during training, and sends its metrics to trackers; only once the first step is done."""

from __future__ import annotations

import importlib.util
import json
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from transformers import SchedulerType, TrainerCallback, TrainerState, TrainingArguments
from transformers.integrations.integration_utils import TensorBoardCallback, TrackioCallback, WandbCallback

from veomni_core.errors import HostError
from veomni_trainer.job.load import dump_job
from veomni_trainer.output.metrics import Row, append_metrics, truncate_metrics
from veomni_trainer.report.progress import Progress
from veomni_trainer.report.write import RunEnding, write_report
from veomni_trainer.run.terminal import print_once
from veomni_transformers.whole_files import write_whole

if TYPE_CHECKING:
    from veomni_trainer.run.start import Start

_SECONDS_BETWEEN = 30.0
_LARGEST_SHARE = 0.02  # of the time that a run takes


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


class RunRecord(TrainerCallback):
    """Writes the run's files, shows its progress and hands rows on; of several processes, only the first one does.

    Earlier results stay untouched until the first step is done, and no tracker is started until then. The report is
    written at most every half minute, and at most a fiftieth of the time; validations don't wait for the half minute.

    Attributes:
        progress: shows rows in the terminal.
    """

    def __init__(self, start: Start) -> None:
        self._start, self._folder, self._resumed_from = start, start.folder, start.point.step
        self.progress = Progress(start.arguments.max_steps, start.point.step)
        self._begun = self._warned = self._warned_of_nothing = False
        self._reported, self._cost = time.monotonic(), 0.0
        # Trainer calls its own callbacks with means over several steps, so these are not among them.
        self._trackers: list[TrainerCallback] = []
        self._now: tuple[Any, ...] = ()
        self._model: Any = None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **parts: Any) -> None:
        if self._resumed_from:
            print_once(f"in force from step {state.global_step + 1} on: {settings_in_force(parts['optimizer'], args)}")

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: Any, model: Any = None, **_: Any
    ) -> None:
        if not state.is_world_process_zero:
            return
        self._now, self._model = (args, state, control), model
        if not self._begun:
            self._begin()
            self._begun = True
            args.run_name = args.run_name or self._folder.path.name
            self._trackers = [self._tracker(name) for name in self._start.job.train.report_to]
            for tracker in self._trackers:
                tracker.on_train_begin(*self._now, model=model)

    def on_row(self, row: Row) -> None:
        """Append one row to the metrics, and show it. The rows of each expert are too many for it: they go beside."""
        if (rows := row.pop("expert_rows", None)) is not None:
            append_metrics(self._folder.expert_rows, {"step": row["step"], "rows": rows})
        append_metrics(self._folder.metrics, row)
        if "bad" in row and not self._warned:
            self._warned = True
            print_once(f"warning: step {row['step']}: {row['bad']}. No checkpoint is written of such a step")
        if row.get("learned_tokens") == 0 and not self._warned_of_nothing:
            self._warned_of_nothing = True
            print_once(
                f"warning: step {row['step']}: nothing is learned, and its loss is 0: data.sequence_length cuts its "
                "documents off before what is learned, or they hold nothing to learn. Later such steps are not named"
            )
        self.progress.show(row)
        logs = {key: value for key, value in row.items() if key != "step" and isinstance(value, (int, float))}
        if "validation_loss" in logs:
            logs = {"eval_loss": logs["validation_loss"]}  # transformers puts it under eval/
        for tracker in self._trackers:
            tracker.on_log(*self._now, model=self._model, logs=logs)
        began, rest = time.monotonic(), self._cost / _LARGEST_SHARE
        soon = "validation_loss" in row and self._cost
        if began - self._reported >= (rest if soon else max(rest, _SECONDS_BETWEEN)):
            write_report(self._folder, RunEnding("running"))
            self._reported = time.monotonic()
            self._cost = self._reported - began

    def end_with(self, error: BaseException) -> None:
        """Write a report of what there is before ``error`` ends the run."""
        if self._begun:
            what = (str(error).strip().splitlines() or [""])[0]
            with suppress(OSError):  # a full disk may be the error itself
                stopped = isinstance(error, KeyboardInterrupt)
                ending = RunEnding("interrupted") if stopped else RunEnding("failed", f"{type(error).__name__}: {what}")
                write_report(self._folder, ending)
        with suppress(OSError):
            self.close()

    def close(self) -> None:
        """Finish the trackers' files and connections."""
        while self._trackers:
            self._trackers.pop().on_train_end(*self._now, model=self._model)

    def _begin(self) -> None:
        self._folder.path.mkdir(parents=True, exist_ok=True)
        if self._resumed_from:
            for metrics in (self._folder.metrics, self._folder.expert_rows):
                truncate_metrics(metrics, self._resumed_from)
            self._folder.set_aside_after(self._resumed_from)
            self._folder.report.unlink(missing_ok=True)
        else:
            self._folder.clear()
        write_whole(self._folder.plan, self._start.binding.plan.to_json())
        write_whole(self._folder.receipt, self._start.binding.receipt.to_json())
        write_whole(self._folder.data, json.dumps([each.to_dict() for each in self._start.corpus.read], indent=1))
        write_whole(self._folder.job, dump_job(self._start.job))

    def _tracker(self, name: str) -> TrainerCallback:
        if name != "tensorboard":
            return {"wandb": WandbCallback, "trackio": TrackioCallback}[name]()
        from torch.utils.tensorboard import SummaryWriter

        purge = self._resumed_from + 1 if self._resumed_from else None  # drop what an earlier run wrote later
        return TensorBoardCallback(SummaryWriter(str(self._folder.path / "tensorboard"), purge_step=purge))


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
