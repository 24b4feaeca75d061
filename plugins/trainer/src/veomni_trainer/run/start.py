"""Everything that a training starts from, in the order in which it is made; nothing is written yet."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import PreTrainedModel, TrainingArguments, set_seed

from veomni_core import Binding, binding_of
from veomni_core.errors import CheckpointError, JobFileError
from veomni_core.parallel.sequence import apply_ulysses
from veomni_trainer.data.corpus import Corpus, read_corpus
from veomni_trainer.data.tokens import load_tokenizer
from veomni_trainer.job.load import changed_keys
from veomni_trainer.job.schema import Job
from veomni_trainer.job.train_section import TrainSection
from veomni_trainer.loop.checkpoints import check_plan
from veomni_trainer.loop.optimizers import check_optimizer
from veomni_trainer.loop.schedules import check_schedule
from veomni_trainer.output.folder import RunFolder
from veomni_trainer.output.shards import Layout, check_layout, is_sharded
from veomni_trainer.run.saying import say
from veomni_trainer.setup.adapter import check_packages, check_resumed, check_validates, with_adapter
from veomni_trainer.setup.arguments import training_arguments
from veomni_trainer.setup.machine_defaults import with_machine_defaults
from veomni_trainer.setup.model import build_model, check_model, ops_config
from veomni_trainer.setup.sequence_parallel import check_sequence_parallel, sequence_parallel_group
from veomni_trainer.setup.sharding import check_started
from veomni_trainer.setup.waiting import limit_waiting

if TYPE_CHECKING:
    from peft import PeftModel

_FSDP_WEIGHTS = "pytorch_model_fsdp*"


@dataclass(frozen=True)
class StartingPoint:
    """The step that a training starts after, and the checkpoint of that step; step 0 has none."""

    step: int = 0
    checkpoint: Path | None = None


@dataclass(frozen=True)
class Start:
    """A training that can begin: its data, its model with weights, and transformers' arguments.

    ``model`` is trained; ``base`` is the model that kernels are bound in: the same one, or the one under an adapter.
    """

    job: Job
    folder: RunFolder
    corpus: Corpus
    model: PreTrainedModel | PeftModel
    base: PreTrainedModel
    binding: Binding
    arguments: TrainingArguments
    point: StartingPoint
    steps: int


def starting_point(job: Job, folder: RunFolder, resume: bool, overwrite: bool) -> StartingPoint:
    """Where a training of ``job`` starts.

    Raises:
        ConfigError: the folder holds an earlier run.
        CheckpointError: there is no checkpoint to resume, or the job's processes can't go on from it.
    """
    if not resume:
        if not overwrite:
            folder.check_free()
        return StartingPoint()
    step, checkpoint = folder.last_checkpoint()
    check_resumed(job, checkpoint)
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
    job = with_machine_defaults(job, ops.registry.detect_hardware("cpu" if job.train.device == "cpu" else None))
    tokenizer = load_tokenizer(job.data.tokenizer, job.data.end_of_document)
    check_schedule(job.train)
    check_optimizer(job.train)
    check_packages(job, to_train=True)
    if job.train.is_sharded or job.train.parameter_groups or job.lora:
        check_model(job, tokenizer)
    if job.train.is_sharded:
        check_started(job.train)
    corpus = read_corpus(job.data, tokenizer)
    arguments = training_arguments(job.train, folder.staging)
    group = sequence_parallel_group(job.train.sp_size, arguments)
    _check_enough(corpus, arguments, job.train)
    check_validates(job, arguments.device, len(corpus.validation) > 0)
    if group is not None:
        check_sequence_parallel(job, ops, tokenizer, group)
    set_seed(job.train.seed)
    model = build_model(job, ops, tokenizer, arguments.device, point.checkpoint)
    binding = binding_of(model)
    assert binding is not None
    limit_waiting(job.train.timeout)
    if group is not None:
        apply_ulysses(model, group)
    trained = with_adapter(model, job, point.checkpoint) if job.lora else model
    accepted = check_plan(point.checkpoint, binding.plan, accept_plan_change) if point.checkpoint else ()
    say(f"{corpus.describe()}\nmodel: {_describe_model(trained, arguments)}\n{binding.receipt.table()}")
    for change in accepted:
        say(f"plan change accepted: {change}")
    if point.checkpoint:
        say(f"resuming from {point.checkpoint}")
        for change in changed_keys(folder.job, job):
            say(f"changed since: {change}")
    return Start(job, folder, corpus, trained, model, binding, arguments, point, _steps(corpus, arguments, job.train))


def _steps(corpus: Corpus, arguments: TrainingArguments, train: TrainSection) -> int:
    """The job's last step; of a job in epochs as ``Trainer`` counts it, where an epoch's last step may be smaller."""
    if train.steps is not None:
        return train.steps
    assert train.epochs is not None
    batches = len(corpus.training) // _sequences_per_batch(arguments, train)
    return math.ceil(train.epochs * math.ceil(batches / train.gradient_accumulation))


def _sequences_per_batch(arguments: TrainingArguments, train: TrainSection) -> int:
    return arguments.train_batch_size * max(arguments.world_size // train.ranks_per_batch, 1)


def _check_enough(corpus: Corpus, arguments: TrainingArguments, train: TrainSection) -> None:
    needed = _sequences_per_batch(arguments, train) * arguments.gradient_accumulation_steps
    if len(corpus.training) < needed:
        raise JobFileError(
            f"data.files gives {len(corpus.training):,} sequences for training, and one step takes {needed:,} "
            "(train.batch_size x gradient_accumulation x processes / (sp_size x tp_size)); lower those, or "
            "data.sequence_length"
        )


def _describe_model(model: PreTrainedModel | PeftModel, arguments: TrainingArguments) -> str:
    count, dtype = sum(p.numel() for p in model.parameters()), str(model.dtype).removeprefix("torch.")
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    adapter = f" ({trained / 1e6:,.1f} M of them trained)" if trained < count else ""
    processes = f", {arguments.world_size} processes" if arguments.world_size > 1 else ""
    return (
        f"{model.config.model_type}, {count / 1e6:,.1f} M parameters{adapter}, {dtype} on {arguments.device}{processes}"
    )
