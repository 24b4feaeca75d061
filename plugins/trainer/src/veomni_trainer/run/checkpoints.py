"""Checkpoints: written atomically when they are due, and checked where a training goes on from one."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate import PartialState
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from veomni_core import Plan
from veomni_core.descriptions.sharding import WHOLE
from veomni_core.errors import CheckpointError, ConfigError, PlanMismatchError
from veomni_core.planning.decisions import SiteDecision
from veomni_trainer.job.load import dump_job
from veomni_trainer.job.resuming import WITHOUT_EFFECT, changed_keys, refuse_changes
from veomni_trainer.job.schema import Job
from veomni_trainer.loop.early_ends import has_stopped
from veomni_trainer.output.base_weights import BASE, check_base
from veomni_trainer.output.folder import RunFolder
from veomni_trainer.output.manifest import damage, total_bytes, write_manifest
from veomni_trainer.output.shards import LAYOUT, check_layout, is_sharded, layout_of, reason
from veomni_trainer.output.trained_sample import Sample, logits_of, write_sample
from veomni_trainer.run.terminal import is_main_process
from veomni_trainer.setup.adapter import check_resumed
from veomni_transformers.whole_files import publish_folder, write_whole

if TYPE_CHECKING:
    from veomni_trainer.run.start import Start

PLAN, JOB, SEQUENCES = "plan.json", "job.yaml", "sequences.json"
_FSDP_WEIGHTS = "pytorch_model_fsdp*"


class CheckpointCallback(TrainerCallback):
    """Triggers saving and validation at the steps that the job names.

    ``Trainer`` writes a checkpoint into the staging folder. This callback adds what it was trained with, and moves the
    checkpoint to its final path atomically.
    """

    def __init__(self, start: Start) -> None:
        self._start, self._train, self._folder = start, start.job.train, start.folder

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        step, last = state.global_step, state.global_step >= state.max_steps
        every = self._train.save_every
        if every != "never" and (last or (isinstance(every, int) and step % every == 0)):
            control.should_save = True
        validate_every = self._train.validate_every
        if self._start.corpus.validation and (last or (validate_every and step % validate_every == 0)):
            control.should_evaluate = True

    def on_save(self, args: TrainingArguments, state: TrainerState, control: Any, **parts: Any) -> None:
        processes = PartialState()
        sample = self._sampled(parts["model"])
        processes.wait_for_everyone()
        if processes.is_main_process:
            written = self._folder.staging / f"checkpoint-{state.global_step}"
            self._start.tokenizer.save(written)
            changes_config = self._train.scores_sequences or self._start.job.model.resize_embeddings
            if changes_config and not (written / "config.json").exists():  # an adapter alone
                parts["model"].config.save_pretrained(written)
            write_whole(written / LAYOUT, json.dumps(layout_of(self._train, processes.num_processes)))
            write_whole(written / SEQUENCES, self._start.sequences)
            if self._start.weights is not None:
                write_whole(written / BASE, self._start.weights)
            write_whole(written / JOB, dump_job(self._start.job))
            write_sample(written, sample)
            write_manifest(written)
            write_whole(written / PLAN, self._start.binding.plan.to_json())  # last: what has a plan is complete
            publish_folder(written, self._folder.path / written.name)
            self._folder.drop_checkpoints(self._train.keep_checkpoints)
        processes.wait_for_everyone()

    def _sampled(self, model: Any) -> Sample:
        """The sample with the logits of ``model``. All ranks call this, before one of them writes."""
        sample = replace(self._start.sample, ends=self._start.corpus.ends)
        if sample.why_not:
            return sample
        try:
            return replace(sample, logits=logits_of(model, sample))
        except Exception as error:  # of a model that takes more than tokens; a checkpoint is worth more than the sample
            return replace(sample, why_not=f"the model can't run on tokens alone ({reason(error)})")


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
    refuse_changes(checkpoint, changes := changed_keys(checkpoint, job))
    if is_main_process():
        check_base(checkpoint, job, changes)
    check_layout(checkpoint, layout_of(job.train, int(os.environ.get("WORLD_SIZE", "1"))))
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
        effect = ", without effect" if change.path == WITHOUT_EFFECT and not job.reads_weights_again else ""
        lines.append(f"changed since{effect}: {change}")
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


def _kernels(plan: Plan, other: Plan) -> Plan:
    """``plan`` without what depends on the sizes alone, for a comparison with ``other``: a run may go on under others.

    Ops that only one of the two plans has, as token dispatch, belong to its sizes.
    """

    def kernel(decision: SiteDecision) -> SiteDecision:
        variant = decision.site.variant if decision.bound else None  # the model's own code is none of a kernel's
        return replace(decision, site=replace(decision.site, sharding=WHOLE, variant=variant))

    theirs = {op.op_name for op in other.ops if op.sites}
    ops = (op for op in plan.ops if op.op_name in theirs)
    return replace(plan, ops=tuple(replace(op, sites=tuple(map(kernel, op.sites))) for op in ops))


def check_sequences(checkpoint: Path, sequences: str) -> None:
    """Raise CheckpointError unless ``sequences`` is the fingerprint of those that the checkpoint was trained on."""
    path = checkpoint / SEQUENCES
    try:
        then, now = json.loads(path.read_text(encoding="utf-8")), json.loads(sequences)
        counts = [each["sequences"] or "a stream" for each in (then, now)]
        tokens = [each.pop("tokens", None) for each in (then, now)]
        judged, judge = (each.pop("rewards", {}) for each in (then, now))
        others = [name for name, file in judge.items() if judged.get(name, file) != file]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} does not say on which sequences the checkpoint was trained ({type(error).__name__}: {error}). "
            f"Restore it, or start a new run from its weights, with model.weights: {checkpoint}"
        ) from error
    if then != now:
        differs = (
            f"on other sequences than this job's ({counts[0]} then, {counts[1]} now), so going on would train on some "
            "twice and on some never. Restore the section data and the files that it names"
        )
    elif tokens[0] not in (None, tokens[1]):
        differs = (
            "on other tokens of the same rows: the tokenizer, its chat template or data.sequence_length is another one "
            "now. Restore them"
        )
    elif others:
        differs = f"with other rewards: the file of {', '.join(others)} was edited. Restore it, name other functions"
    else:
        return
    raise CheckpointError(
        f"{checkpoint} was trained {differs}, or start a new run from its weights, with model.weights: {checkpoint}"
    )


def check_plan(checkpoint: Path, plan: Plan, accept_change: bool) -> tuple[str, ...]:
    """The differences between ``plan`` and the plan that the checkpoint was trained with.

    Raises:
        PlanMismatchError: the plans differ, and ``accept_change`` is false.
        CheckpointError: the checkpoint's plan can't be read.
    """
    path = checkpoint / PLAN
    try:
        before = Plan.from_json(path.read_text(encoding="utf-8"))
    except Exception as error:  # whatever JSON of another form leads to
        raise CheckpointError(f"{path} is not a plan: {type(error).__name__}: {error}. Restore it") from error
    # Not only where the checkpoint is in shards: an adapter over a model in shards is written whole.
    sites = (site for op in (*before.ops, *plan.ops) for site in op.sites)
    if any(each.site.sharding != WHOLE for each in sites):
        changes = _kernels(before, plan).diff(_kernels(plan, before))
    else:
        changes = before.diff(plan)
    if not changes:
        return ()
    if not accept_change:
        listed = "\n".join(f"  - {change}" for change in changes)
        raise PlanMismatchError(
            f"{checkpoint} was trained with other kernels than this job would use now:\n{listed}\n"
            "Restore the job's ops_implementation (and the plugins' versions), or accept the change with "
            "--accept-plan-change"
        )
    return changes
