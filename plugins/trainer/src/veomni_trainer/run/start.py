"""Everything that a training starts from, in the order in which it is made; nothing is written yet."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel, TrainingArguments, set_seed

from veomni_core import Binding, Registry, binding_of
from veomni_core.commands import FrozenJob
from veomni_core.errors import JobFileError
from veomni_trainer.data.batches import CHAT
from veomni_trainer.data.corpus import Corpus, read_corpus
from veomni_trainer.data.method_inputs import MethodInputs
from veomni_trainer.data.rows import check_answers, prompt_ids, prompt_inputs, read_rows
from veomni_trainer.data.streaming import Stream
from veomni_trainer.data.tokens import Tokenizer
from veomni_trainer.job.load import dump_job
from veomni_trainer.job.method_packages import require_trl
from veomni_trainer.job.schema import Job
from veomni_trainer.job.train_section import TrainSection
from veomni_trainer.loop.checkpoints import Origin, check_plan, check_sequences
from veomni_trainer.loop.loader_processes import loader_processes
from veomni_trainer.loop.optimizers import check_optimizer
from veomni_trainer.loop.schedules import check_schedule
from veomni_trainer.loop.trackers import check_trackers
from veomni_trainer.output.disk import check_disk_space
from veomni_trainer.output.export import check_push
from veomni_trainer.output.folder import RunFolder
from veomni_trainer.output.trained_sample import Sample, sample_ids
from veomni_trainer.run.console import print_once
from veomni_trainer.run.starting_point import StartingPoint, describe_resumption
from veomni_trainer.setup.adapter import check_packages, check_validates, with_adapter
from veomni_trainer.setup.arguments import may_leave_parameters_unused, training_arguments
from veomni_trainer.setup.model import build_model, check_model, conditions, ops_config
from veomni_trainer.setup.packing import check_packed_media, check_packing
from veomni_trainer.setup.process_timeout import set_process_timeout
from veomni_trainer.setup.scoring_models import with_labels
from veomni_trainer.setup.sequence_parallel import check_sequence_parallel, sharing_of
from veomni_trainer.setup.sharding import check_started
from veomni_trainer.setup.tokenizer import job_tokenizer, other_ids
from veomni_trainer.setup.trl_arguments import check_method, method_inputs, trl_config, trl_tokenizer
from veomni_transformers.packed.document_positions import DocumentPositions

if TYPE_CHECKING:
    from peft import PeftModel


@dataclass(frozen=True)
class Start:
    """A training that can begin: its data, its model with weights, and transformers' arguments.

    ``model`` is trained; ``base`` is the model that kernels are bound in: the same one, or the one under an adapter.
    ``inputs`` are those of a method's trainer.
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
    origin: Origin
    inputs: MethodInputs | None = None


def prepare(
    job: Job,
    folder: RunFolder,
    point: StartingPoint,
    accept_plan_change: bool,
    frozen: FrozenJob | None = None,
    registry: Registry | None = None,
) -> Start:
    """Read the data, build and bind the model, and print the receipt. The plan is that of ``frozen``, if it is given.

    Kernels are those of ``registry``; plugins are discovered without it.

    Raises:
        VeOmniError: an error that the user can correct.
    """
    ops = ops_config(job, registry)
    tokenizer = job_tokenizer(job)
    check_settings(job)
    check_model(job, tokenizer)
    if job.train.is_sharded:
        check_started(job.train)
    corpus = read_data(job, tokenizer)
    check_method(job, tokenizer, int(os.environ.get("WORLD_SIZE", "1")))
    kind, more = trl_config(job.train, job.data.sequence_length) if job.train.uses_trl else (TrainingArguments, {})
    arguments = training_arguments(job.train, folder.staging, kind, **more)
    sequences = corpus.fingerprint()
    if point.checkpoint:
        check_sequences(point.checkpoint, sequences)
    shared = sharing_of(job.train, arguments)
    check_enough(corpus, job.train, arguments.world_size)
    steps = steps_of(corpus, job.train, arguments.world_size)
    arguments.max_steps = steps
    arguments.dataloader_num_workers = loader_processes(job.data.workers, corpus, arguments.device)
    corpus = corpus.drawn(steps * _sequences_per_step(job.train, arguments.world_size))
    check_validates(job, arguments.device, bool(corpus.validation))
    if shared is not None:
        check_sequence_parallel(job, ops, tokenizer, shared)
    set_seed(job.train.seed)
    labelled = with_labels(job, corpus)
    model = build_model(labelled, ops, tokenizer, arguments.device, point.checkpoint, frozen.check if frozen else None)
    binding = binding_of(model)
    assert binding is not None
    set_process_timeout(job.train.timeout)
    arguments.ddp_find_unused_parameters = may_leave_parameters_unused(model, binding.plan, job.train)
    if job.data.packing:
        if DocumentPositions.suits(model):
            corpus = replace(corpus, positions=DocumentPositions(model))
        check_packed_media(model, corpus, conditions(job).autocast)
    order = shared.apply(model).order if shared is not None else None
    if job.data.packing:
        check_packing(model, job.train.batch_size, conditions(job).autocast, order)
    trained = with_adapter(model, job, point.checkpoint) if job.lora else model
    inputs = method_inputs(job, tokenizer, arguments.device) if job.train.method != "pretrain" else None
    check_disk_space(job.train, folder.path, trained)
    accepted = check_plan(point.checkpoint, binding.plan, accept_plan_change) if point.checkpoint else ()
    print_once(f"{corpus.describe()}\nmodel: {_describe_model(trained, arguments)}\n{binding.receipt.table()}")
    if frozen:
        print_once(f"frozen: the plugins and the plan are those of {frozen}")
    for what in (*binding.receipt.verification.kernels, *binding.receipt.verification.sites):
        print_once(f"verified: {what}")
    for change in accepted:
        print_once(f"plan change accepted: {change}")
    if point.checkpoint:
        print_once(describe_resumption(job, folder, point))
    origin = Origin(
        binding.plan, tokenizer, dump_job(job), sequences, _sample(job, corpus, inputs), lambda: corpus.ends
    )
    return Start(job, folder, corpus, trained, model, binding, arguments, point, steps, origin, inputs)


def _sample(job: Job, corpus: Corpus, inputs: MethodInputs | None) -> Sample:
    """The tokens that each checkpoint's logits are kept for."""
    first: Any = next(iter(corpus.training.first(1))) if isinstance(corpus.training, Stream) else corpus.training[0]
    media: dict[str, Any] = {}
    if job.train.learns_from_rows and corpus.processor is not None:
        media = {**prompt_inputs(first, corpus.processor, return_tensors="pt")}
        ids = media.pop("input_ids")[0]
    elif job.train.learns_from_rows:
        assert inputs is not None
        ids = torch.tensor(prompt_ids(first, inputs.tokenizer, job.train.columns[0]))
    else:
        ids = first["input_ids"]
    quantized = job.lora is not None and job.lora.quantization
    if CHAT in first:  # whole: what stands for a picture can't be cut
        media = {name: each for name, each in corpus.batcher()([first]).items() if name not in ("input_ids", "labels")}
    return Sample(
        ids if media else sample_ids(ids, job.train.parts_of_sequence),
        media=media,
        why_not="training held the weights under the adapter quantized" if quantized else "",
        autocast=conditions(job).autocast,
        is_new=job.model.weights is None,
    )


def check_settings(job: Job) -> None:
    """Check what the job's settings need of this machine and its libraries, before any data is read.

    Raises:
        ConfigError: a schedule, an optimizer or one of their options that there isn't.
        HostError: a package, or a token for the Hub, is missing.
    """
    check_trackers(job.train.report_to)
    check_push(job.train.push_to)
    check_schedule(job.train)
    check_optimizer(job.train)
    check_packages(job, to_train=True)
    if job.train.uses_trl:
        require_trl(f"train.method: {job.train.method}")


def read_data(job: Job, tokenizer: Tokenizer) -> Corpus:
    """What the job trains on: sequences of tokens, or rows for a method of TRL's.

    Raises:
        JobFileError: it can't be read, or doesn't fit.
        ConfigError: the method needs another tokenizer.
    """
    corpus = _read(job, tokenizer)
    return replace(corpus, notes=(*corpus.notes, *other_ids(job, tokenizer)))


def _read(job: Job, tokenizer: Tokenizer) -> Corpus:
    if not job.train.learns_from_rows:
        return read_corpus(job.data, tokenizer, job.train.seed)
    (source,) = job.data.training_sources.values()
    corpus = read_rows(source, tokenizer, job.train)
    longest = job.data.sequence_length
    return check_answers(corpus, trl_tokenizer(job, tokenizer), job.train, longest, tokenizer.end_of)


def steps_of(corpus: Corpus, train: TrainSection, processes: int) -> int:
    """The job's last step; of a job in epochs as ``Trainer`` counts it, where an epoch's last step may be smaller.

    Raises:
        JobFileError: the job is in epochs of data that has no end.
    """
    if train.steps is not None:
        return train.steps
    assert train.epochs is not None
    if corpus.sequences is None:
        raise JobFileError("train.epochs: a stream (data.streaming) has no end, so it has no epochs; write train.steps")
    batches = corpus.sequences // _sequences_per_batch(train, processes)
    return math.ceil(train.epochs * math.ceil(batches / train.gradient_accumulation))


def _sequences_per_batch(train: TrainSection, processes: int) -> int:
    return train.batch_size * max(processes // train.ranks_per_batch, 1)


def check_enough(corpus: Corpus, train: TrainSection, processes: int) -> None:
    """Raise JobFileError unless ``corpus`` has sequences enough for one step of so many processes.

    A stream and a mixture of sources start again where they end.
    """
    needed, sequences = _sequences_per_step(train, processes), corpus.sequences
    if sequences is not None and sequences < needed and not corpus.is_mixed:
        raise JobFileError(
            f"data.files gives {sequences:,} sequences for training, and one step takes {needed:,} "
            "(train.batch_size x gradient_accumulation x processes / (sp_size x cp_size x tp_size)); lower those, or "
            "data.sequence_length"
        )


def _sequences_per_step(train: TrainSection, processes: int) -> int:
    return _sequences_per_batch(train, processes) * train.gradient_accumulation


def _describe_model(model: PreTrainedModel | PeftModel, arguments: TrainingArguments) -> str:
    count, dtype = sum(p.numel() for p in model.parameters()), str(model.dtype).removeprefix("torch.")
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    adapter = f" ({trained / 1e6:,.1f} M of them trained)" if trained < count else ""
    processes = f", {arguments.world_size} processes" if arguments.world_size > 1 else ""
    return (
        f"{model.config.model_type}, {count / 1e6:,.1f} M parameters{adapter}, {dtype} on {arguments.device}{processes}"
    )
