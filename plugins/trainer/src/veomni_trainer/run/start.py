"""Everything that a training starts from, in the order in which it is made; nothing is written yet."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedModel, TrainingArguments, set_seed

from veomni_core import Binding, binding_of
from veomni_core.errors import JobFileError
from veomni_core.parallel.sequence import apply_ulysses
from veomni_trainer.data.corpus import Corpus, read_corpus
from veomni_trainer.data.fingerprint import fingerprint
from veomni_trainer.data.tokens import load_tokenizer
from veomni_trainer.job.load import dump_job
from veomni_trainer.job.schema import Job
from veomni_trainer.job.train_section import TrainSection
from veomni_trainer.loop.checkpoints import Origin, check_data, check_plan
from veomni_trainer.output.folder import RunFolder
from veomni_trainer.run.saying import say
from veomni_trainer.run.starting_point import StartingPoint, describe_resumption
from veomni_trainer.setup.arguments import training_arguments
from veomni_trainer.setup.model import build_model, check_model, ops_config
from veomni_trainer.setup.room import check_room
from veomni_trainer.setup.sequence_parallel import check_sequence_parallel, sequence_parallel_group
from veomni_trainer.setup.sharding import check_started
from veomni_trainer.setup.unused_parameters import may_leave_parameters_unused
from veomni_trainer.setup.waiting import limit_waiting


@dataclass(frozen=True)
class Start:
    """A training that can begin: its data, its bound model with weights, and transformers' arguments."""

    job: Job
    folder: RunFolder
    corpus: Corpus
    model: PreTrainedModel
    binding: Binding
    arguments: TrainingArguments
    point: StartingPoint
    origin: Origin


def prepare(job: Job, folder: RunFolder, point: StartingPoint, accept_plan_change: bool) -> Start:
    """Read the data, build and bind the model, and print the receipt.

    Raises:
        VeOmniError: an error that the user can correct.
    """
    ops = ops_config(job)
    tokenizer = load_tokenizer(job.data.tokenizer, job.data.end_of_document)
    if job.train.is_sharded:
        check_model(job, tokenizer)
        check_started(job.train)
    corpus = read_corpus(job.data, tokenizer)
    arguments = training_arguments(job.train, folder.staging)
    data = fingerprint(corpus.training)
    if point.checkpoint:
        check_data(point.checkpoint, data)
    group = sequence_parallel_group(job.train.sp_size, arguments)
    check_enough(corpus, job.train, arguments.world_size)
    if group is not None:
        check_sequence_parallel(job, ops, tokenizer, group)
    set_seed(job.train.seed)
    model = build_model(job, ops, tokenizer, arguments.device, point.checkpoint)
    binding = binding_of(model)
    assert binding is not None
    limit_waiting(job.train.timeout)
    arguments.ddp_find_unused_parameters = may_leave_parameters_unused(model, binding.plan, job.train)
    check_room(job.train, folder, model)
    if group is not None:
        apply_ulysses(model, group)
    accepted = check_plan(point.checkpoint, binding.plan, accept_plan_change) if point.checkpoint else ()
    say(f"{corpus.describe()}\nmodel: {_describe_model(model, arguments)}\n{binding.receipt.table()}")
    for change in accepted:
        say(f"plan change accepted: {change}")
    if point.checkpoint:
        say(describe_resumption(job, folder, point))
    return Start(job, folder, corpus, model, binding, arguments, point, Origin(binding.plan, dump_job(job), data))


def check_enough(corpus: Corpus, train: TrainSection, processes: int) -> None:
    """Raise JobFileError unless ``corpus`` has sequences enough for one step of so many processes."""
    groups = max(processes // train.ranks_per_batch, 1)
    needed = train.batch_size * groups * train.gradient_accumulation
    if len(corpus.training) < needed:
        raise JobFileError(
            f"data.files gives {len(corpus.training):,} sequences for training, and one step takes {needed:,} "
            "(train.batch_size x gradient_accumulation x processes / (sp_size x tp_size)); lower those, or "
            "data.sequence_length"
        )


def _describe_model(model: PreTrainedModel, arguments: TrainingArguments) -> str:
    count, dtype = sum(p.numel() for p in model.parameters()), str(model.dtype).removeprefix("torch.")
    processes = f", {arguments.world_size} processes" if arguments.world_size > 1 else ""
    return f"{model.config.model_type}, {count / 1e6:,.1f} M parameters, {dtype} on {arguments.device}{processes}"
