"""Trains from a start to the job's last step, or to an interrupt."""

from __future__ import annotations

import contextlib
import shutil

import torch

from veomni_core.errors import HostError
from veomni_trainer.job.load import dump_job
from veomni_trainer.loop.checkpoints import CheckpointCallback
from veomni_trainer.loop.expert_loads import ExpertLoads
from veomni_trainer.loop.interrupt import InterruptCallback
from veomni_trainer.loop.trainer import JobTrainer
from veomni_trainer.report.progress import Progress
from veomni_trainer.run.record import RunRecord
from veomni_trainer.run.saying import is_main_process
from veomni_trainer.run.start import Start


def fit(start: Start) -> bool:
    """Train; returns whether an interrupt ended it.

    Raises:
        HostError: the memory isn't enough.
    """
    train, folder, binding, arguments, point = (
        start.job.train,
        start.folder,
        start.binding,
        start.arguments,
        start.point,
    )
    loads = ExpertLoads(start.model, binding, train, arguments.process_index) if train.measures_loads else None
    progress = Progress(train.steps, point.step)
    read = [source.to_dict() for source in start.corpus.read]
    record = RunRecord(folder, binding, dump_job(start.job), read, point.step, progress)
    interrupt = InterruptCallback()
    saver = CheckpointCallback(folder, binding.plan, start.tokenizer, train, validates=bool(start.corpus.validation))
    is_new = not folder.path.exists()
    if is_main_process():
        shutil.rmtree(folder.staging, ignore_errors=True)
    try:
        callbacks = [record, interrupt, saver]
        trainer = JobTrainer(start.model, arguments, start.corpus, record.on_row, callbacks, train, loads)
        with progress.running(), interrupt.listening():
            trainer.train(resume_from_checkpoint=str(point.checkpoint) if point.checkpoint else None)
    except torch.OutOfMemoryError as error:
        raise HostError(
            f"out of memory: {str(error).splitlines()[0]} Lower train.batch_size or data.sequence_length (and raise "
            "train.gradient_accumulation to keep the batch), or set train.gradient_checkpointing: true"
        ) from error
    finally:
        if is_main_process():
            shutil.rmtree(folder.staging, ignore_errors=True)
            if is_new:
                with contextlib.suppress(OSError):
                    folder.path.rmdir()  # only where nothing was written
    return interrupt.interrupted
