"""Runs one job from start to end: training, comparison, exported weights, report."""

from __future__ import annotations

import gc
import os
import shutil
from pathlib import Path

import torch
import transformers
from torch import distributed

from veomni_core.errors import ConfigError, HostError
from veomni_trainer.job.schema import Job
from veomni_trainer.loop.early_stop import has_stopped
from veomni_trainer.loop.signals import INTERRUPTED
from veomni_trainer.output.export import export_checkpoint
from veomni_trainer.output.folder import RunFolder
from veomni_trainer.report.write import describe_run, write_report
from veomni_trainer.run.eager import train_eager
from veomni_trainer.run.fit import fit
from veomni_trainer.run.saying import is_main_process, say
from veomni_trainer.run.start import StartingPoint, prepare, starting_point
from veomni_trainer.setup.waiting import naming_lost_processes


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
        say(f"\nThe same job, all-eager, in {folder.compared(compare).path}:")
        code = train_eager(folder, accept_plan_change)
        interrupted = code == INTERRUPTED
        if code not in (0, INTERRUPTED):
            write_report(folder)
            raise HostError(
                f"the eager run ended with exit code {code}, for the reason above; {folder.path} is complete"
            )
    if is_main_process():
        if job.train.export and not interrupted:
            shutil.rmtree(folder.exported, ignore_errors=True)  # of the same run, before it was resumed
            merges = job.train.export == "merged"
            export_checkpoint(folder.last_checkpoint()[1], folder.exported, job.model.trust_remote_code, merges)
            print(f"weights: {folder.exported}", flush=True)
        write_report(folder)
        print(describe_run(folder), flush=True)
    if interrupted:
        say("Interrupted. Continue with the same command and --resume.")
    return interrupted


def _train(job: Job, folder: RunFolder, resume: bool, overwrite: bool, accept_plan_change: bool) -> bool:
    """Train unless the run is complete; returns whether it was interrupted. Frees the model when it returns."""
    point = starting_point(job, folder, resume, overwrite)
    if _is_complete(job, folder, point, job.train.steps):
        return False
    start = prepare(job, folder, point, accept_plan_change)
    if _is_complete(job, folder, point, start.steps):  # a job in epochs, whose steps depend on its data
        return False
    return fit(start)


def _is_complete(job: Job, folder: RunFolder, point: StartingPoint, steps: int | None) -> bool:
    """Whether nothing is left to train; says so if that is the case."""
    length = "steps" if job.train.epochs is None else "epochs"
    if point.checkpoint is None or steps is None:
        return False
    if point.step > steps:
        asked = f"train.{length} is {getattr(job.train, length)}"
        raise ConfigError(f"{asked}, but {point.checkpoint} is already past that. Raise train.{length}")
    if point.step == steps:
        say(f"{folder.path} is complete: it stands at step {point.step} of {steps}. Raise train.{length} to go on.")
    elif has_stopped(point.checkpoint, job.train):
        say(
            f"{folder.path} is complete: it stopped early at step {point.step}. "
            "Raise train.early_stop.patience to go on."
        )
    else:
        return False
    return True


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
