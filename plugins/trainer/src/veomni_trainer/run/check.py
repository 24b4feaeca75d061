"""Checks whether ``veomni train`` would accept a job, and settles what a job leaves to the machine and to the Hub."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from veomni_core import Hardware, JobConditions, Registry
from veomni_core.commands import FROZEN, load_yaml
from veomni_core.errors import ConfigError, HostError, JobFileError
from veomni_trainer.job.load import load_job
from veomni_trainer.job.method_packages import require_trl
from veomni_trainer.job.schema import Job
from veomni_trainer.loop.optimizers import check_optimizer, check_schedule
from veomni_trainer.setup.adapter import check_packages, with_adapter
from veomni_trainer.setup.conditions import conditions, for_this_machine, ops_config, with_machine_defaults
from veomni_trainer.setup.model import check_model, job_tokenizer, model_config
from veomni_trainer.setup.postponed import postpone_bitsandbytes
from veomni_transformers.jobs.hub_snapshots import is_hub_id, pinned


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


def check_loaded(job: Job, hardware: Hardware) -> JobConditions:
    """The same for a job that was read already."""
    on_cpu = hardware.detected and job.train.device == "cpu"
    job = with_machine_defaults(job, Hardware.cpu() if on_cpu else hardware)
    ops_config(job)
    check_libraries(job, trains_here=hardware.detected)
    tokenizer = job_tokenizer(job)
    check_model(job, tokenizer)
    config = model_config(job, tokenizer)
    architecture = next(iter(config.architectures or ()), None) if job.train.scores_sequences else None
    adapt = partial(with_adapter, job=job) if job.lora else None
    vocabulary = config.get_text_config().vocab_size
    return replace(conditions(job), vocabulary=vocabulary, architecture=architecture, adapt=adapt)


def check_libraries(job: Job, *, trains_here: bool) -> None:
    """Check what the job's settings need of libraries; of this machine's packages only if it ``trains_here``.

    Raises:
        ConfigError: a schedule, an optimizer or one of their options that there isn't.
        HostError: a package is missing.
    """
    check_schedule(job.train)
    try:
        check_optimizer(job.train)
    except HostError:
        if trains_here:  # the machine that has the named hardware may have the optimizer's package
            raise
    check_packages(job, to_train=trains_here)
    if trains_here and job.train.uses_trl:
        require_trl(f"train.method: {job.train.method}")


def settled_job(job: Job, registry: Registry, recorded: Path | None) -> Job:
    """``job`` with the defaults of this machine, and with what it names on the Hub at a commit.

    Raises:
        ConfigError: the job names a lock file and nobody has read it: plugins are here already.
        VeOmniError: as :func:`for_this_machine` and :func:`pinned_job`, which see.
    """
    if job.train.frozen is not None and not os.environ.get(FROZEN):
        raise ConfigError(
            f"train.frozen: the command `veomni train` reads it, before it imports a plugin. Here, set {FROZEN} to "
            f"{job.train.frozen} before the process starts"
        )
    return pinned_job(for_this_machine(job, registry), recorded)


def pinned_job(job: Job, recorded: Path | None = None) -> Job:
    """``job`` with Hub ids at a commit, as ``owner/name@commit``; the same job if it names nothing on the Hub.

    Args:
        job: the job.
        recorded: the job file of the run that goes on: its commits are taken for the same ids and revisions.

    Raises:
        ConfigError: a revision of what is not on the Hub.
        HostError: the Hub and its cache don't have what is named.
    """
    known = dict(_known(recorded))

    def pin(key: str, name: str, revision: str | None) -> str:
        if not is_hub_id(name):
            return name
        return pinned(key, name, revision, kind="model" if key == "data.tokenizer" else "dataset", known=known)

    return job.model_copy(update={"model": job.model.pinned(known), "data": job.data.renamed(pin)})


def _known(recorded: Path | None) -> Iterator[tuple[str, str]]:
    """The recorded ids at a commit, by what is written for them; none of a file that resuming will refuse."""
    try:
        job = load_yaml(recorded) if recorded and recorded.is_file() else {}
    except JobFileError:
        return
    model, data = job.get("model") or {}, job.get("data") or {}
    named = [(model.get(key), model.get("revision")) for key in ("weights", "config")]
    named += [(data.get("tokenizer"), None)]
    named += [(data.get(key), data.get("revision")) for key in ("files", "validation_files")]
    named += [(each.get("files"), each.get("revision") or data.get("revision")) for each in data.get("sources") or ()]
    for names, revision in named:
        for name in names if isinstance(names, list) else [names]:
            identifier, at, _ = str(name).partition("@")
            if at:
                yield f"{identifier}@{revision}" if revision else identifier, str(name)
