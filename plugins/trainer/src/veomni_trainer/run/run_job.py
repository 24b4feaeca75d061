"""Runs one job from start to end: training, comparison, exported weights, report."""

from __future__ import annotations

import gc
import os
import shutil
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from torch import distributed

from veomni_core import Registry, discover
from veomni_core.commands import FrozenJob
from veomni_core.errors import ConfigError, HostError, TrainingDivergedError
from veomni_trainer.job.load import dump_job
from veomni_trainer.job.schema import Job
from veomni_trainer.loop.alternating_steps import AlternatingSteps
from veomni_trainer.loop.signals import INTERRUPTED
from veomni_trainer.output.disk import naming_failed_writes
from veomni_trainer.output.export import export_checkpoint, push
from veomni_trainer.output.folder import RunFolder, locked
from veomni_trainer.report.write import RunEnding, State, describe_run, write_report
from veomni_trainer.run.check import check_frozen
from veomni_trainer.run.console import is_main_process, print_once
from veomni_trainer.run.eager import EAGER, eager_beside, train_eager
from veomni_trainer.run.memory_errors import naming_lack_of_memory
from veomni_trainer.run.pinned_job import pinned_job
from veomni_trainer.run.start import prepare
from veomni_trainer.run.starting_point import completion, starting_point
from veomni_trainer.run.training import Ending, fit
from veomni_trainer.setup.machine_defaults import for_this_machine
from veomni_trainer.setup.process_timeout import naming_lost_processes


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
    check_frozen(job)
    registry = discover()
    folder = RunFolder(Path(job.train.output_dir))
    job = pinned_job(for_this_machine(job, registry), folder.job if resume else None)
    run = _Run(
        job, folder, resume, overwrite, accept_plan_change, compare, compared or bool(compare), turns, frozen, registry
    )
    with locked(folder.path) if is_main_process() else nullcontext():
        return run.run()


@dataclass
class _Run:
    """A job's run in its folder."""

    job: Job
    folder: RunFolder
    resume: bool | Path
    overwrite: bool
    accept_plan_change: bool
    compare: str | None
    compared: bool
    turns: AlternatingSteps | None
    frozen: FrozenJob | None
    registry: Registry

    def run(self) -> bool:
        """Train, compare and report; returns whether an interrupt ended the job early."""
        job, folder = self.job, self.folder
        try:
            with naming_lost_processes(job.train.timeout), naming_lack_of_memory(self.compare == EAGER):
                ending, eager_code = self._train()
        except KeyboardInterrupt:
            saved = folder.checkpoints()
            again = f"Go on from {saved[-1][1].name} with --resume." if saved else "There is no checkpoint."
            print_once(f"\nStopped at once. {again}")
            return True
        _let_go()
        stopped = ending.interrupted or bool(ending.bad_step)
        if self.compare and eager_code is None and not stopped:
            print_once(f"\nThe same job, all-eager, in {folder.compared(EAGER).path}:")
            eager_code = train_eager(folder, self.accept_plan_change)
        interrupted = ending.interrupted or eager_code == INTERRUPTED
        if is_main_process():
            self._finish(ending, stopped or interrupted)
        if ending.bad_step and is_main_process():  # alone: torchrun ends all others with the first one that fails
            raise TrainingDivergedError(_explain(ending.bad_step, job, folder))
        if eager_code not in (None, 0, INTERRUPTED):
            raise HostError(
                f"the eager run ended with exit code {eager_code}, for the reason above; what {folder.path} holds of "
                "this job is complete"
            )
        if interrupted:
            print_once("Interrupted. Continue with the same command and --resume.")
        return interrupted

    def _train(self) -> tuple[Ending, int | None]:
        """Train unless the run is complete. Frees the model when it returns.

        Returns:
            How training ended, and the exit code of the eager run if that took turns with it.
        """
        job, folder = self.job, self.folder
        point = starting_point(job, folder, self.resume, self.overwrite)
        if done := completion(job, folder, point, job.train.steps):
            print_once(done)
            return Ending(), None
        start = prepare(job, folder, point, self.accept_plan_change, self.frozen, self.registry)
        if done := completion(job, folder, point, start.steps):  # of a job in epochs, whose steps depend on its data
            print_once(done)
            return Ending(), None
        if self.compare != EAGER:
            return fit(start, self.compared, self.turns), None
        print_once(f"The same job, all-eager, takes turns with this one, in {folder.compared(EAGER).path}")
        with eager_beside(dump_job(job), folder, bool(point.step), self.accept_plan_change) as eager:
            ending = fit(start, self.compared, eager.turns)
            return ending, eager.wait(stop=ending.interrupted or bool(ending.bad_step))

    def _finish(self, ending: Ending, stopped: bool) -> None:
        """Export the weights if the run has all of them, and write the report."""
        job, folder = self.job, self.folder
        state: State = "diverged" if ending.bad_step else "interrupted" if ending.interrupted else "complete"
        said = ""
        with naming_failed_writes(folder.path):
            if job.train.export and not stopped:
                shutil.rmtree(folder.exported, ignore_errors=True)  # of the same run, before it was resumed
                merges = job.train.export == "merged"
                last = folder.last_checkpoint()[1]
                said = export_checkpoint(last, folder.exported, job.model.trust_remote_code, merges)
                print(f"weights: {folder.exported}: {said}", flush=True)
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
