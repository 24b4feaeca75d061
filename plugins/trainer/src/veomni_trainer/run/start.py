"""Everything that a training starts from, in the order in which it is made; nothing is written yet."""

from __future__ import annotations

import math
import multiprocessing
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
from veomni_trainer.job.schema import Job
from veomni_trainer.job.train_section import TrainSection
from veomni_trainer.output.base_weights import known_base
from veomni_trainer.output.disk import check_disk_space
from veomni_trainer.output.export import check_push
from veomni_trainer.output.folder import RunFolder
from veomni_trainer.output.trained_sample import Sample, sample_ids
from veomni_trainer.run.check import check_libraries
from veomni_trainer.run.checkpoints import StartingPoint, check_plan, check_sequences, describe_resumption
from veomni_trainer.run.record import check_trackers
from veomni_trainer.run.terminal import is_main_process, print_once
from veomni_trainer.setup.adapter import check_validates, with_adapter
from veomni_trainer.setup.arguments import may_leave_parameters_unused, training_arguments
from veomni_trainer.setup.conditions import conditions, ops_config
from veomni_trainer.setup.method_models import with_labels
from veomni_trainer.setup.model import build_model, build_skeleton, check_model, job_tokenizer, other_ids
from veomni_trainer.setup.packing import check_packed_media, check_packing
from veomni_trainer.setup.processes import check_started, set_process_timeout, sharing_of
from veomni_trainer.setup.trl_arguments import check_method, method_inputs, reward_hashes, trl_config, trl_tokenizer
from veomni_transformers.packed.document_positions import DocumentPositions

if TYPE_CHECKING:
    from peft import PeftModel

_LOADERS_OF_MEDIA = 2  # two pictures of 1024x1024 take one process 60 to 80 ms to decode and to cut into patches


@dataclass(frozen=True)
class Start:
    """A training that can begin: its data, its model with weights, and transformers' arguments.

    ``model`` is trained; ``base`` is the model that kernels are bound in: the same one, or the one under an adapter.
    ``sequences`` is their fingerprint, ``weights`` that of those that the run started from (in the first process),
    ``sample`` has the tokens whose logits each checkpoint keeps, and ``inputs`` are those of a method's trainer.
    """

    job: Job
    folder: RunFolder
    corpus: Corpus
    model: PreTrainedModel | PeftModel
    base: PreTrainedModel
    binding: Binding
    arguments: TrainingArguments
    point: StartingPoint
    tokenizer: Tokenizer
    sequences: str
    weights: str | None
    sample: Sample
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
    tokenizer, corpus, sequences = checked_data(job, point)
    kind, more = trl_config(job.train, job.data.sequence_length) if job.train.uses_trl else (TrainingArguments, {})
    arguments = training_arguments(job.train, folder.staging, kind, **more)
    share = sharing_of(job.train, arguments)
    arguments.max_steps = steps_of(corpus, job.train, arguments.world_size)
    arguments.dataloader_num_workers = _loader_processes(job.data.workers, corpus, arguments.device)
    drawn = arguments.max_steps * job.train.gradient_accumulation
    corpus = corpus.drawn(drawn * _sequences_per_batch(job.train, arguments.world_size))
    check_validates(job, arguments.device, bool(corpus.validation))
    if share is not None:  # before weights are loaded; a weak reference alone is kept to the model that is shared
        skeleton = build_skeleton(job, ops, tokenizer)
        share(skeleton).undo()
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
    order = share(model).order if share is not None else None
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
    sample, begun = _sample(job, corpus, inputs), known_base(job, point.checkpoint) if is_main_process() else None
    return Start(
        job, folder, corpus, trained, model, binding, arguments, point, tokenizer, sequences, begun, sample, inputs
    )


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


def checked_data(job: Job, point: StartingPoint, processes: int | None = None) -> tuple[Tokenizer, Corpus, str]:
    """The job's tokenizer, its data and their fingerprint, once all has been checked that can be without weights.

    Args:
        processes: as many as the job needs, where it is not to start; without it, those that torchrun has started.

    Raises:
        ConfigError: a setting, or the model, doesn't fit the job, its data or the libraries here.
        HostError: a package, a token for the Hub, or a process is missing.
        JobFileError: the data can't be read, or is too little for a step.
        CheckpointError: the run goes on from a checkpoint of other sequences.
    """
    tokenizer = job_tokenizer(job)
    check_trackers(job.train.report_to)
    check_push(job.train.push_to)
    check_libraries(job, trains_here=True)
    check_model(job, tokenizer, point.checkpoint)
    if processes is None:
        processes = int(os.environ.get("WORLD_SIZE", "1"))
        if job.train.is_sharded:
            check_started(job.train)
    corpus = read_data(job, tokenizer)
    check_method(job, tokenizer, processes)
    tokens = f"{tokenizer.fingerprint} {job.data.sequence_length}" if job.train.learns_from_rows else None
    sequences = corpus.fingerprint({"tokens": tokens, "rewards": reward_hashes(job.train)})
    if point.checkpoint:
        check_sequences(point.checkpoint, sequences)
    _check_enough(corpus, job.train, processes)
    steps = steps_of(corpus, job.train, processes)
    if point.step < steps and (too_long := job.train.too_long_warmup(steps)):
        raise JobFileError(too_long)
    return tokenizer, corpus, sequences


def read_data(job: Job, tokenizer: Tokenizer) -> Corpus:
    """What the job trains on: sequences of tokens, or rows for a method of TRL's.

    Raises:
        JobFileError: it can't be read, or doesn't fit.
        ConfigError: the method needs another tokenizer.
    """
    if job.train.learns_from_rows:
        (source,) = job.data.training_sources.values()
        corpus = read_rows(source, tokenizer, job.train)
        longest = job.data.sequence_length
        corpus = check_answers(corpus, trl_tokenizer(job, tokenizer), job.train, longest, tokenizer.end_of)
    else:
        corpus = read_corpus(job.data, tokenizer, job.train.seed)
    return replace(corpus, notes=(*corpus.notes, *other_ids(job, tokenizer)))


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


def _check_enough(corpus: Corpus, train: TrainSection, processes: int) -> None:
    """Raise JobFileError unless ``corpus`` has sequences enough for one step of so many processes.

    A stream and a mixture of sources start again where they end.
    """
    needed, sequences = _sequences_per_batch(train, processes) * train.gradient_accumulation, corpus.sequences
    if sequences is not None and sequences < needed and not corpus.is_mixed:
        raise JobFileError(
            f"data.files gives {sequences:,} sequences for training, and one step takes {needed:,} "
            "(train.batch_size x gradient_accumulation x processes / (sp_size x cp_size x tp_size)); lower those, or "
            "data.sequence_length"
        )


def _loader_processes(wanted: int | None, corpus: Corpus, device: torch.device) -> int:
    """How many processes make batches; with 0 the training process does, before each step.

    Without ``data.workers`` media have two where an accelerator computes meanwhile, and all else none.
    """
    if wanted is not None:
        return wanted
    # Another way to start processes would pickle the model's processor and the code of its towers.
    forks = multiprocessing.get_start_method() == "fork"
    has_media = corpus.processor is not None and not isinstance(corpus.training, Stream)
    return _LOADERS_OF_MEDIA if has_media and forks and device.type != "cpu" else 0


def _describe_model(model: PreTrainedModel | PeftModel, arguments: TrainingArguments) -> str:
    count, dtype = sum(p.numel() for p in model.parameters()), str(model.dtype).removeprefix("torch.")
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    adapter = f" ({trained / 1e6:,.1f} M of them trained)" if trained < count else ""
    processes = f", {arguments.world_size} processes" if arguments.world_size > 1 else ""
    return (
        f"{model.config.model_type}, {count / 1e6:,.1f} M parameters{adapter}, {dtype} on {arguments.device}{processes}"
    )
