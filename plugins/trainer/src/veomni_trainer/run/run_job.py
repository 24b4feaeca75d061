"""Runs one job from start to end: data, model, receipt, training, comparison, report."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
from pathlib import Path

import torch
import transformers
from torch import distributed
from transformers import PreTrainedModel, TrainingArguments, set_seed

from veomni_core import Binding, binding_of
from veomni_core.errors import CheckpointError, ConfigError, HostError, JobFileError
from veomni_core.parallel.sequence import apply_ulysses
from veomni_trainer.data.corpus import Corpus, read_corpus
from veomni_trainer.data.tokens import load_tokenizer
from veomni_trainer.job.load import changed_keys, dump_job
from veomni_trainer.job.schema import Job, TrainSection
from veomni_trainer.loop.checkpoints import CheckpointCallback, check_plan
from veomni_trainer.loop.expert_loads import ExpertLoads
from veomni_trainer.loop.interrupt import InterruptCallback
from veomni_trainer.loop.signals import INTERRUPTED
from veomni_trainer.loop.trainer import JobTrainer
from veomni_trainer.output.export import export_checkpoint
from veomni_trainer.output.folder import RunFolder
from veomni_trainer.output.shards import Layout, check_layout, is_sharded
from veomni_trainer.report.progress import Progress
from veomni_trainer.report.write import describe_run, write_report
from veomni_trainer.run.eager import train_eager
from veomni_trainer.run.record import RunRecord
from veomni_trainer.setup.arguments import training_arguments
from veomni_trainer.setup.model import build_model, check_model, ops_config
from veomni_trainer.setup.sequence_parallel import check_sequence_parallel, sequence_parallel_group
from veomni_trainer.setup.sharding import check_started
from veomni_trainer.setup.waiting import limit_waiting, naming_lost_processes

_FSDP_WEIGHTS = "pytorch_model_fsdp*"


def run_job(
    job: Job,
    *,
    compare: str | None = None,
    resume: bool = False,
    overwrite: bool = False,
    accept_plan_change: bool = False,
) -> bool:
    """Train, compare and report; returns whether an interrupt ended the job early.

    Raises:
        VeOmniError: an error that the user can correct. The output folder is then unchanged, or its files are complete.
    """
    if compare and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "--compare starts a second training and needs a single process, but torchrun started several. Run the job "
            "twice, the second time with --set 'model.ops_implementation={preset: eager}' and another train.output_dir"
        )
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    folder = RunFolder(Path(job.train.output_dir))
    with naming_lost_processes(job.train.timeout):
        interrupted = _train(job, folder, resume, overwrite, accept_plan_change)
    _let_go()
    if compare and not interrupted:
        _say(f"\nThe same job, all-eager, in {folder.compared(compare).path}:")
        code = train_eager(folder, accept_plan_change)
        interrupted = code == INTERRUPTED
        if code not in (0, INTERRUPTED):
            write_report(folder)
            raise HostError(
                f"the eager run ended with exit code {code}, for the reason above; {folder.path} is complete"
            )
    if _is_main_process():
        if job.train.export and not interrupted:
            shutil.rmtree(folder.exported, ignore_errors=True)  # of the same run, before it was resumed
            export_checkpoint(folder.last_checkpoint()[1], folder.exported, job.model.trust_remote_code)
            print(f"weights: {folder.exported}", flush=True)
        write_report(folder)
        print(describe_run(folder), flush=True)
    if interrupted:
        _say("Interrupted. Continue with the same command and --resume.")
    return interrupted


def _train(job: Job, folder: RunFolder, resume: bool, overwrite: bool, accept_plan_change: bool) -> bool:
    ops = ops_config(job)
    step, checkpoint = _starting_point(job, folder, resume, overwrite)
    if step == job.train.steps:
        _say(f"{folder.path} is complete: it stands at step {step} of {job.train.steps}. Raise train.steps to go on.")
        return False
    tokenizer = load_tokenizer(job.data.tokenizer, job.data.end_of_document)
    if job.train.is_sharded:
        check_model(job, tokenizer)
        check_started(job.train)
    corpus = read_corpus(job.data, tokenizer)
    arguments = training_arguments(job.train, folder.staging)
    group = sequence_parallel_group(job.train.sp_size, arguments)
    _check_enough(corpus, arguments, job.train)
    if group is not None:
        check_sequence_parallel(job, ops, tokenizer, group)
    set_seed(job.train.seed)
    model = build_model(job, ops, tokenizer, arguments.device, checkpoint)
    binding = binding_of(model)
    assert binding is not None
    limit_waiting(job.train.timeout)
    if group is not None:
        apply_ulysses(model, group)
    accepted = check_plan(checkpoint, binding.plan, accept_plan_change) if checkpoint else ()
    _say(f"{corpus.describe()}\nmodel: {_describe_model(model, arguments)}\n{binding.receipt.table()}")
    for change in accepted:
        _say(f"plan change accepted: {change}")
    if checkpoint:
        _say(f"resuming from {checkpoint}")
        for change in changed_keys(folder.job, job):
            _say(f"changed since: {change}")

    return _fit(job, folder, model, binding, corpus, arguments, checkpoint, step)


def _fit(
    job: Job,
    folder: RunFolder,
    model: PreTrainedModel,
    binding: Binding,
    corpus: Corpus,
    arguments: TrainingArguments,
    checkpoint: Path | None,
    step: int,
) -> bool:
    """Train until the job's last step or an interrupt; returns whether it was interrupted."""
    loads = ExpertLoads(model, binding, job.train, arguments.process_index) if job.train.measures_loads else None
    progress = Progress(job.train.steps, step)
    record = RunRecord(folder, binding, dump_job(job), step, progress)
    interrupt = InterruptCallback()
    saver = CheckpointCallback(folder, binding.plan, job.train, validates=len(corpus.validation) > 0)
    is_new = not folder.path.exists()
    if _is_main_process():
        shutil.rmtree(folder.staging, ignore_errors=True)
    try:
        trainer = JobTrainer(model, arguments, corpus, record.on_row, [record, interrupt, saver], job.train, loads)
        with progress.running(), interrupt.listening():
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    except torch.OutOfMemoryError as error:
        raise HostError(
            f"out of memory: {str(error).splitlines()[0]} Lower train.batch_size or data.sequence_length (and raise "
            "train.gradient_accumulation to keep the batch), or set train.gradient_checkpointing: true"
        ) from error
    finally:
        if _is_main_process():
            shutil.rmtree(folder.staging, ignore_errors=True)
            if is_new:
                with contextlib.suppress(OSError):
                    folder.path.rmdir()  # only where nothing was written
    return interrupt.interrupted


def _starting_point(job: Job, folder: RunFolder, resume: bool, overwrite: bool) -> tuple[int, Path | None]:
    if not resume:
        if not overwrite:
            folder.check_free()
        return 0, None
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
    return step, checkpoint


def _check_enough(corpus: Corpus, arguments: TrainingArguments, train: TrainSection) -> None:
    groups = max(arguments.world_size // train.ranks_per_batch, 1)
    needed = arguments.train_batch_size * groups * arguments.gradient_accumulation_steps
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


def _let_go() -> None:
    """Destroy the process group, and free the accelerator's memory for the eager run of a comparison.

    The model is collected first. DDP's reducer is destroyed while holding the GIL. If it held the last reference to its
    process group, it would wait for gloo's thread, which may wait for the GIL to free a tensor: a deadlock (PyTorch
    2.13).
    """
    gc.collect()
    if distributed.is_initialized():
        distributed.destroy_process_group()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def _is_main_process() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _say(text: str) -> None:
    if _is_main_process():
        print(text, flush=True)
