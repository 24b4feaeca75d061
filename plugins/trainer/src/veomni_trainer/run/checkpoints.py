"""Writes checkpoints atomically when they are due, and checks that one is resumed with the plan it was trained with."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate import PartialState
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from veomni_core import Plan
from veomni_core.descriptions.sharding import WHOLE
from veomni_core.errors import CheckpointError, PlanMismatchError
from veomni_core.planning.decisions import SiteDecision
from veomni_trainer.job.load import dump_job
from veomni_trainer.output.manifest import write_manifest
from veomni_trainer.output.shards import LAYOUT, Layout, is_sharded, reason
from veomni_trainer.output.trained_sample import Sample, logits_of, write_sample
from veomni_transformers.whole_files import publish_folder, write_whole

if TYPE_CHECKING:
    from veomni_trainer.run.start import Start

PLAN, JOB, SEQUENCES = "plan.json", "job.yaml", "sequences.json"


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
            write_whole(written / LAYOUT, Layout.of(self._train, processes.num_processes).to_json())
            write_whole(written / SEQUENCES, self._start.sequences)
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
        before = path.read_text(encoding="utf-8")
        counts = [json.loads(each)["sequences"] or "a stream" for each in (before, sequences)]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} does not say on which sequences the checkpoint was trained ({type(error).__name__}: {error}). "
            f"Restore it, or start a new run from its weights, with model.weights: {checkpoint}"
        ) from error
    if before != sequences:
        raise CheckpointError(
            f"{checkpoint} was trained on other sequences than this job's ({counts[0]} then, {counts[1]} now), so "
            "going on would train on some twice and on some never. Restore the section data and the files that it "
            f"names, or start a new run from its weights, with model.weights: {checkpoint}"
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
    changes = _kernels(before, plan).diff(_kernels(plan, before)) if is_sharded(checkpoint) else before.diff(plan)
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
