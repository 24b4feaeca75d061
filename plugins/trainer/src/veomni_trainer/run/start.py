"""Everything that a training starts from, in the order in which it is made; nothing is written yet."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel, TrainingArguments, set_seed

from veomni_core import Binding, binding_of
from veomni_core.errors import CheckpointError, ConfigError, JobFileError
from veomni_core.parallel.sequence import apply_ulysses
from veomni_trainer.data.corpus import Corpus, read_corpus
from veomni_trainer.data.tokens import Tokenizer
from veomni_trainer.job.load import changed_keys
from veomni_trainer.job.schema import Job
from veomni_trainer.job.train_section import TrainSection
from veomni_trainer.loop.checkpoints import check_plan
from veomni_trainer.output.folder import RunFolder
from veomni_trainer.output.shards import Layout, check_layout, is_sharded
from veomni_trainer.run.saying import say
from veomni_trainer.setup.arguments import training_arguments
from veomni_trainer.setup.model import build_model, check_model, conditions, ops_config
from veomni_trainer.setup.packing import check_packing
from veomni_trainer.setup.sequence_parallel import check_sequence_parallel, sequence_parallel_group
from veomni_trainer.setup.sharding import check_started
from veomni_trainer.setup.tokenizer import job_tokenizer
from veomni_trainer.setup.waiting import limit_waiting

_FSDP_WEIGHTS = "pytorch_model_fsdp*"


@dataclass(frozen=True)
class StartingPoint:
    """The step that a training starts after, and the checkpoint of that step; step 0 has none."""

    step: int = 0
    checkpoint: Path | None = None


@dataclass(frozen=True)
class Start:
    """A training that can begin: its data, its bound model with weights, and transformers' arguments."""

    job: Job
    folder: RunFolder
    tokenizer: Tokenizer
    corpus: Corpus
    model: PreTrainedModel
    binding: Binding
    arguments: TrainingArguments
    point: StartingPoint


def starting_point(job: Job, folder: RunFolder, resume: bool, overwrite: bool) -> StartingPoint:
    """Where a training of ``job`` starts.

    Raises:
        ConfigError: the folder holds an earlier run, or one that is already past the job's last step.
        CheckpointError: there is no checkpoint to resume, or the job's processes can't go on from it.
    """
    if not resume:
        if not overwrite:
            folder.check_free()
        return StartingPoint()
    step, checkpoint = folder.last_checkpoint()
    if step > job.train.steps:
        raise ConfigError(f"train.steps is {job.train.steps}, but {checkpoint} is already past that. Raise train.steps")
    if any(checkpoint.glob(_FSDP_WEIGHTS)) != job.train.fsdp:
        written = "false" if job.train.fsdp else "true"
        raise CheckpointError(f"{checkpoint} was written with train.fsdp: {written}; resume with the same value")
    if is_sharded(checkpoint):
        check_layout(checkpoint, Layout.of(job.train, int(os.environ.get("WORLD_SIZE", "1"))))
    elif job.train.is_sharded:
        raise CheckpointError(
            f"{checkpoint} was not written by a sharded job, so its optimizer can't be read in shards; resume without "
            "train.fsdp_size, tp_size and ep_size, or name the checkpoint as model.weights of a new job"
        )
    return StartingPoint(step, checkpoint)


def prepare(job: Job, folder: RunFolder, point: StartingPoint, accept_plan_change: bool) -> Start:
    """Read the data, build and bind the model, and print the receipt.

    Raises:
        VeOmniError: an error that the user can correct.
    """
    ops = ops_config(job)
    tokenizer = job_tokenizer(job)
    if job.train.is_sharded:
        check_model(job, tokenizer)
        check_started(job.train)
    corpus = read_corpus(job.data, tokenizer, job.train.seed)
    arguments = training_arguments(job.train, folder.staging)
    group = sequence_parallel_group(job.train.sp_size, arguments)
    corpus = corpus.drawn(job.train.steps * _sequences_per_step(job.train, arguments.world_size))
    check_enough(corpus, job.train, arguments.world_size)
    if group is not None:
        check_sequence_parallel(job, ops, tokenizer, group)
    set_seed(job.train.seed)
    model = build_model(job, ops, tokenizer, arguments.device, point.checkpoint)
    binding = binding_of(model)
    assert binding is not None
    limit_waiting(job.train.timeout)
    if group is not None:
        apply_ulysses(model, group)
    if job.data.packing:
        check_packing(model, job.train.batch_size, conditions(job).autocast, group)
    accepted = check_plan(point.checkpoint, binding.plan, accept_plan_change) if point.checkpoint else ()
    say(f"{corpus.describe()}\nmodel: {_describe_model(model, arguments)}\n{binding.receipt.table()}")
    for change in accepted:
        say(f"plan change accepted: {change}")
    if point.checkpoint:
        say(f"resuming from {point.checkpoint}")
        for change in changed_keys(folder.job, job):
            say(f"changed since: {change}")
    return Start(job, folder, tokenizer, corpus, model, binding, arguments, point)


def check_enough(corpus: Corpus, train: TrainSection, processes: int) -> None:
    """Raise JobFileError unless ``corpus`` has sequences enough for one step of so many processes.

    A stream and a mixture of sources start again where they end.
    """
    needed, sequences = _sequences_per_step(train, processes), corpus.sequences
    if sequences is not None and sequences < needed and not corpus.is_mixed:
        raise JobFileError(
            f"data.files gives {sequences:,} sequences for training, and one step takes {needed:,} "
            "(train.batch_size x gradient_accumulation x processes / (sp_size x tp_size)); lower those, or "
            "data.sequence_length"
        )


def _sequences_per_step(train: TrainSection, processes: int) -> int:
    groups = max(processes // train.ranks_per_batch, 1)
    return train.batch_size * groups * train.gradient_accumulation


def _describe_model(model: PreTrainedModel, arguments: TrainingArguments) -> str:
    count, dtype = sum(p.numel() for p in model.parameters()), str(model.dtype).removeprefix("torch.")
    processes = f", {arguments.world_size} processes" if arguments.world_size > 1 else ""
    return f"{model.config.model_type}, {count / 1e6:,.1f} M parameters, {dtype} on {arguments.device}{processes}"
