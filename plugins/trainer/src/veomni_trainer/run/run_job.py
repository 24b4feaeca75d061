"""Runs one job from start to end: training, comparison, exported weights, report."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
import transformers
from torch import distributed

from veomni_core import discover
from veomni_core.commands import FrozenJob
from veomni_core.errors import ConfigError, HostError, TrainingDivergedError
from veomni_trainer.job.load import dump_job
from veomni_trainer.job.schema import Job
from veomni_trainer.output.disk import naming_failed_writes
from veomni_trainer.output.export import export_checkpoint, push
from veomni_trainer.output.folder import RunFolder, locked
from veomni_trainer.report.write import RunEnding, State, describe_run, write_report
from veomni_trainer.run.check import settled_job
from veomni_trainer.run.checkpoints import completion, starting_point
from veomni_trainer.run.eager import EAGER, AlternatingSteps, eager_beside, train_eager
from veomni_trainer.run.raising_kernels import naming_kernels
from veomni_trainer.run.start import prepare
from veomni_trainer.run.terminal import INTERRUPTED, is_main_process, print_once
from veomni_trainer.run.training import Ending, fit
from veomni_transformers.jobs.job_files import first_line

_LOST = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer", "Timed out waiting")
_MEMORY = ("can't allocate memory", "not enough memory", "Cannot allocate memory")  # torch's RuntimeError of a CPU


def run_job(
    job: Job,
    *,
    compare: str | None = None,
    resume: bool | Path = False,
    overwrite: bool = False,
    accept_plan_change: bool = False,
    compared: bool = False,
    turns: AlternatingSteps | None = None,
    frozen: FrozenJob | None = None,
) -> bool:
    """Train, compare and report; returns whether an interrupt ended the job early.

    Args:
        job: the job.
        compare: ``eager`` to train the same job all-eager too, turn by turn; ``eager-after`` to do so afterwards.
        resume: whether to go on from the newest complete checkpoint; or the checkpoint to go on from.
        overwrite: whether an earlier run may be replaced.
        accept_plan_change: whether a run may go on with other kernels.
        compared: whether this is the other run of a comparison.
        turns: the turns that this run takes with the one that it is compared with.
        frozen: the job in a lock file, whose plan it must have.

    Raises:
        LockMismatchError: the plan, or what is installed, differs from the lock file.
        TrainingDivergedError: training ended at a step whose loss or gradient norm is not finite. Of several processes
            the first one raises it, when it has written the report.
        VeOmniError: an error that the user can correct. The output folder is then unchanged, or its files are complete.
    """
    if compare and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "--compare starts a second training and needs a single process, but torchrun started several. Run the job "
            "twice, the second time with --set 'model.ops_implementation={preset: eager}' and another train.output_dir"
        )
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    registry, folder = discover(), RunFolder(Path(job.train.output_dir))
    job = settled_job(job, registry, folder.job if resume else None)

    def train() -> tuple[Ending, int | None]:
        """Train unless the run is complete. Frees the model when it returns.

        Returns:
            How training ended, and the exit code of the eager run if that took turns with it.
        """
        point = starting_point(job, folder, resume, overwrite)
        if done := completion(job, folder, point, job.train.steps):
            print_once(done)
            return Ending(), None
        start = prepare(job, folder, point, accept_plan_change, frozen, registry)
        steps = start.arguments.max_steps  # of a job in epochs they depend on its data
        if done := completion(job, folder, point, steps):
            print_once(done)
            return Ending(), None
        if compare != EAGER:
            return fit(start, compared or bool(compare), turns), None
        print_once(f"The same job, all-eager, takes turns with this one, in {folder.compared(EAGER).path}")
        with eager_beside(dump_job(job), folder, bool(point.step), accept_plan_change) as (own_turns, wait):
            ending = fit(start, True, own_turns)
            return ending, wait(ending.interrupted or bool(ending.bad_step))

    with locked(folder.path) if is_main_process() else nullcontext():
        try:
            lacking = naming_lack_of_memory(compare == EAGER)
            with naming_kernels(), naming_lost_processes(job.train.timeout), lacking:
                ending, eager_code = train()
        except KeyboardInterrupt:
            saved = folder.checkpoints()
            again = f"Go on from {saved[-1][1].name} with --resume." if saved else "There is no checkpoint."
            print_once(f"\nStopped at once. {again}")
            return True
        _let_go()
        stopped = ending.interrupted or bool(ending.bad_step)
        if compare and eager_code is None and not stopped:
            print_once(f"\nThe same job, all-eager, in {folder.compared(EAGER).path}:")
            eager_code = train_eager(folder, accept_plan_change)
        interrupted = ending.interrupted or eager_code == INTERRUPTED
        if is_main_process():
            _finish(job, folder, ending, stopped or interrupted)
            if ending.bad_step:  # alone: torchrun ends all others with the first one that fails
                raise TrainingDivergedError(_explain(ending.bad_step, job, folder))
        if eager_code not in (None, 0, INTERRUPTED):
            raise HostError(
                f"the eager run ended with exit code {eager_code}, for the reason above; what {folder.path} holds of "
                "this job is complete"
            )
        if interrupted:
            print_once("Interrupted. Continue with the same command and --resume.")
        return interrupted


def _finish(job: Job, folder: RunFolder, ending: Ending, stopped: bool) -> None:
    """Export the weights if the run has all of them, and write the report."""
    state: State = "diverged" if ending.bad_step else "interrupted" if ending.interrupted else "complete"
    said = ""
    if job.train.export and not stopped:
        shutil.rmtree(folder.exported, ignore_errors=True)  # of the same run, before it was resumed
        last, merges = folder.last_checkpoint()[1], job.train.export == "merged"
        with naming_failed_writes(folder.exported):
            said = export_checkpoint(last, folder.exported, job.model.trust_remote_code, merges)
        print(f"weights: {folder.exported}: {said}", flush=True)
    with naming_failed_writes(folder.report):
        write_report(folder, RunEnding(state, ending.bad_step), said)
    if job.train.push_to and said:
        print_once(f"push_to: {push(folder.exported, job.train.push_to)}")
    print_once(describe_run(folder))


def _explain(bad_step: str, job: Job, folder: RunFolder) -> str:
    saved = folder.checkpoints()
    where = f"The last checkpoint is {saved[-1][1]}" if saved else "There is no checkpoint yet"
    stops = "Training stopped there" if job.train.on_bad_loss == "stop" else "It is the last step"
    again = (
        "Go on from it with other settings, such as --resume --set train.learning_rate="
        if saved
        else "Start again with --overwrite and other settings, such as --set train.learning_rate="
    ) + f"{job.train.learning_rate / 10:.2g}"
    past = ", or let training pass such steps with train.on_bad_loss: warn" if job.train.on_bad_loss == "stop" else ""
    return f"{bad_step}. {stops}, and no checkpoint was written of it. {where}. {again}{past}"


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


@contextmanager
def naming_lack_of_memory(two_runs: bool) -> Iterator[None]:
    """Name the keys that lower the memory; ``two_runs``: whether two runs share it.

    Raises:
        HostError: the memory of the device, or of the machine, isn't enough.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        on_cpu = isinstance(error, MemoryError) or any(sign in str(error) for sign in _MEMORY)
        if not on_cpu and not isinstance(error, torch.OutOfMemoryError):
            raise
        shared = (
            "Two runs share the memory: --compare eager-after trains one after the other. Or l" if two_runs else "L"
        )
        raise HostError(
            f"out of memory: {first_line(error).rstrip('.')}. {shared}ower train.batch_size or data.sequence_length "
            "(and raise train.gradient_accumulation to keep the batch), or set train.gradient_checkpointing: true"
        ) from error


@contextmanager
def naming_lost_processes(seconds: int) -> Iterator[None]:
    """Turn torch's errors about a process that is gone into one that names the cause.

    Raises:
        HostError: another process ended, or did not answer for ``seconds``.
    """
    try:
        yield
    except RuntimeError as error:
        if not (isinstance(error, distributed.DistError) or any(sign in str(error) for sign in _LOST)):
            raise
        raise HostError(
            f"another process of this job ended, or did not answer for {seconds} s (train.timeout): what the first one "
            f"printed says why. Continue from the last checkpoint with --resume. Here torch says: "
            f"{' '.join(str(error).split())[:200]}"
        ) from error
