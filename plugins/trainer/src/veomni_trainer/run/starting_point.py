"""Where a training starts: at the beginning, or after a checkpoint, all of whose files are checked here."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from veomni_core.errors import CheckpointError, ConfigError
from veomni_trainer.job.resuming import OnResume, changed_keys, refuse_changes
from veomni_trainer.job.schema import Job
from veomni_trainer.loop.early_ends import has_stopped
from veomni_trainer.output.folder import RunFolder
from veomni_trainer.output.manifest import damage, total_bytes
from veomni_trainer.output.shards import Layout, check_layout, is_sharded
from veomni_trainer.run.terminal import is_main_process
from veomni_trainer.setup.adapter import check_resumed

_FSDP_WEIGHTS = "pytorch_model_fsdp*"


@dataclass(frozen=True)
class StartingPoint:
    """The step that a training starts after, and the checkpoint of that step; step 0 has none."""

    step: int = 0
    checkpoint: Path | None = None


def starting_point(job: Job, folder: RunFolder, resume: bool | Path, overwrite: bool) -> StartingPoint:
    """Where a training of ``job`` starts.

    Args:
        resume: whether to go on from the newest complete checkpoint; or the checkpoint to go on from.

    Raises:
        ConfigError: the folder holds an earlier run, or the job has values that a run can't go on with.
        CheckpointError: there is no checkpoint to resume, it is damaged, or the job's processes can't go on from it.
    """
    if resume is False:
        if not overwrite:
            folder.check_free()
        return StartingPoint()
    step, checkpoint = folder.last_checkpoint() if resume is True else folder.checkpoint(resume)
    _refuse_damage(folder, step, checkpoint)
    check_resumed(job, checkpoint)
    if any(checkpoint.glob(_FSDP_WEIGHTS)) != job.train.fsdp:
        written = "false" if job.train.fsdp else "true"
        raise CheckpointError(f"{checkpoint} was written with train.fsdp: {written}; resume with the same value")
    if job.train.is_sharded and not is_sharded(checkpoint) and job.lora is None:
        raise CheckpointError(
            f"{checkpoint} was not written by a sharded job, so its optimizer can't be read in shards; resume without "
            "train.fsdp_size, tp_size and ep_size, or name the checkpoint as model.weights of a new job"
        )
    refuse_changes(checkpoint, changed_keys(checkpoint, job))
    check_layout(checkpoint, Layout.of(job.train, int(os.environ.get("WORLD_SIZE", "1"))))
    return StartingPoint(step, checkpoint)


def completion(job: Job, folder: RunFolder, point: StartingPoint, steps: int | None) -> str:
    """Why nothing is left to train of a job of so many steps, as a sentence; empty if there is something left.

    Raises:
        ConfigError: the checkpoint is of a later step than the job's last one.
    """
    if point.checkpoint is None or steps is None:
        return ""
    length = "steps" if job.train.epochs is None else "epochs"
    if point.step > steps:
        asked = f"train.{length} is {getattr(job.train, length)}"
        raise ConfigError(f"{asked}, but {point.checkpoint} is already past that. Raise train.{length}")
    if point.step == steps:
        return f"{folder.path} is complete: it stands at step {point.step} of {steps}. Raise train.{length} to go on."
    if has_stopped(point.checkpoint, job.train):
        return (
            f"{folder.path} is complete: it stopped early at step {point.step}. "
            "Raise train.early_stop.patience to go on."
        )
    return ""


def describe_resumption(job: Job, folder: RunFolder, point: StartingPoint) -> str:
    """What is said of a run that goes on: from where, what was changed since, and what is not as it was."""
    checkpoint = point.checkpoint
    assert checkpoint is not None
    lines = [f"resuming from {checkpoint}"]
    for step, path in folder.incomplete_checkpoints():
        if step > point.step:
            lines.append(f"{path} is not complete (it holds no plan.json) and is passed over")
    for change in changed_keys(checkpoint, job):
        goes_on = change.on_resume is OnResume.CONTINUED
        lines.append(f"changed since{', without effect: ' if goes_on else ': '}{change}")
    rank = f"_{os.environ.get('RANK', '0')}" if int(os.environ.get("WORLD_SIZE", "1")) > 1 else ""
    if not (checkpoint / f"rng_state{rank}.pth").exists():
        lines.append("it was written by another number of processes: dropout draws other numbers than it would have")
    return "\n".join(lines)


def _refuse_damage(folder: RunFolder, step: int, checkpoint: Path) -> None:
    problems = _damage(checkpoint) or _unreadable(checkpoint)
    if not problems:
        return
    older = [path for each, path in folder.checkpoints() if each < step and not damage(path, reads=False)]
    instead = (
        f"Go on from the one before it with --resume={older[-1]}"
        if older
        else f"{folder.path} holds no older one. Start again with --overwrite, or restore the file"
    )
    raise CheckpointError(f"{checkpoint} is damaged: {'; '.join(problems)}. {instead}")


def _damage(checkpoint: Path) -> list[str]:
    """As :func:`damage`; of several processes, the first one reads the files."""
    if not is_main_process():
        return damage(checkpoint, reads=False)
    columns = (TextColumn("checking {task.description}"), BarColumn(bar_width=None), DownloadColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(checkpoint.name, total=total_bytes(checkpoint))
        return damage(checkpoint, on_read=lambda count: bar.advance(task, count))


def _unreadable(checkpoint: Path) -> list[str]:
    """Files of the right size that don't hold what they should, as far as that is quick to see."""
    problems = []
    for name in ("trainer_state.json", "sequences.json"):
        try:
            json.loads((checkpoint / name).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            problems.append(f"{name} can't be read ({error})")
    return problems
