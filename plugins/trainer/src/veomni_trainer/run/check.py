"""Called by ``veomni plan``: checks whether ``veomni train`` would accept a job file."""

from __future__ import annotations

from pathlib import Path

from veomni_core import JobConditions
from veomni_trainer.job.load import load_job
from veomni_trainer.job.schema import Job
from veomni_trainer.setup.model import check_model, conditions, ops_config
from veomni_trainer.setup.tokenizer import job_tokenizer


def check_job(path: Path) -> JobConditions:
    """Raise the error that `train` would raise for the job in ``path``, or return the conditions that it plans under.

    Reads the job file, the model's config and the tokenizer; of a sharded job also the model's modules. Doesn't
    check what depends on the machine that trains: the text files, the devices and the output folder.

    Raises:
        VeOmniError: the job must be corrected.
    """
    return check_loaded(load_job(path))


def check_loaded(job: Job) -> JobConditions:
    """The same for a job that was read already."""
    ops_config(job)
    check_model(job, job_tokenizer(job))
    return conditions(job)
