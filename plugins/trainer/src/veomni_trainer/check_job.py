"""What ``veomni plan`` asks about a job: whether ``veomni train`` would take what its file says."""

from __future__ import annotations

from pathlib import Path

from veomni_core import JobConditions
from veomni_trainer.load_job import load_job
from veomni_trainer.model import conditions, model_config, ops_config
from veomni_trainer.tokens import load_tokenizer


def check_job(path: Path) -> JobConditions:
    """Raise what `train` would raise for the job in ``path``, in the order in which it would; else under what it plans.

    Read are the file, the model's config and the tokenizer. What only the machine that trains can tell is left to it:
    whether the text, the devices and a free output folder are there.

    Raises:
        VeOmniError: the job must be corrected.
    """
    job = load_job(path)
    ops_config(job)
    model_config(job, load_tokenizer(job.data.tokenizer, job.data.end_of_document))
    return conditions(job)
