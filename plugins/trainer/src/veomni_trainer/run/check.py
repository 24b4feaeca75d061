"""Called by ``veomni plan``: checks whether ``veomni train`` would accept a job file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from veomni_core import Hardware, JobConditions
from veomni_core.commands import FROZEN
from veomni_core.errors import ConfigError, HostError
from veomni_trainer.job.load import load_job
from veomni_trainer.job.method_packages import require_trl
from veomni_trainer.job.schema import Job
from veomni_trainer.loop.optimizers import check_optimizer
from veomni_trainer.loop.schedules import check_schedule
from veomni_trainer.setup.adapter import check_packages
from veomni_trainer.setup.machine_defaults import with_machine_defaults
from veomni_trainer.setup.model import check_model, conditions, model_config, ops_config
from veomni_trainer.setup.postponed import postpone_bitsandbytes
from veomni_trainer.setup.tokenizer import job_tokenizer


def check_job(path: Path, hardware: Hardware, changes: Sequence[str] = ()) -> JobConditions:
    """Raise the error that `train` would raise for the job in ``path``, or return the conditions that it plans under.

    ``changes`` are the values of ``--set``. What the job leaves to the machine is the default on ``hardware``.

    Reads the job file, the model's config and the tokenizer; of a sharded job also the model's modules. Doesn't
    check what depends on the machine that trains: the text files, the devices and the output folder.

    Raises:
        VeOmniError: the job must be corrected.
    """
    job = load_job(path, changes)
    postpone_bitsandbytes(job)
    return check_loaded(job, hardware)


def check_frozen(job: Job) -> None:
    """Raise ConfigError if the job names a lock file and nobody has read it: plugins are here already."""
    if job.train.frozen is not None and not os.environ.get(FROZEN):
        raise ConfigError(
            f"train.frozen: the command `veomni train` reads it, before it imports a plugin. Here, set {FROZEN} to "
            f"{job.train.frozen} before the process starts"
        )


def check_loaded(job: Job, hardware: Hardware) -> JobConditions:
    """The same for a job that was read already."""
    on_cpu = hardware.detected and job.train.device == "cpu"
    job = with_machine_defaults(job, Hardware.cpu() if on_cpu else hardware)
    ops_config(job)
    check_schedule(job.train)
    try:
        check_optimizer(job.train)
    except HostError:
        if hardware.detected:  # the machine that has the named hardware may have the optimizer's package
            raise
    check_packages(job, to_train=hardware.detected)
    if hardware.detected and job.train.uses_trl:
        require_trl(f"train.method: {job.train.method}")
    tokenizer = job_tokenizer(job)
    check_model(job, tokenizer)
    config = model_config(job, tokenizer)
    architecture = next(iter(config.architectures or ()), None) if job.train.scores_sequences else None
    return replace(conditions(job), vocabulary=config.get_text_config().vocab_size, architecture=architecture)
