"""Reads a job: parses YAML, applies ``--set``, validates, and makes relative paths absolute."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from veomni_core.commands import at_home, beside_job, load_yaml
from veomni_trainer.job.data_section import BYTES, STDLIB, DataSection
from veomni_trainer.job.problems import check_assignment, explain_problems
from veomni_trainer.job.schema import Job
from veomni_transformers.jobs.assignments import assigned, read_assignments
from veomni_transformers.jobs.hub_snapshots import is_hub_id
from veomni_transformers.jobs.job_files import check_variables


def load_job(path: Path, assignments: Iterable[str] = ()) -> Job:
    """The job in ``path``, with the ``--set`` changes in ``assignments``.

    A relative path in the job is looked up next to the job file first, then in the working directory; ``output_dir`` is
    always relative to the working directory.

    Raises:
        JobFileError: the file is missing, isn't YAML, or isn't a valid job.
        ConfigError: a ``--set`` path doesn't exist.
    """
    return parse_job(apply_overrides(load_yaml(path), assignments), str(path), path.parent)


def parse_job(data: Mapping[str, Any], source: str = "job", folder: Path | None = None) -> Job:
    """The job in ``data``; its relative paths are looked up in ``folder`` first."""
    try:
        job = Job.model_validate(data)
    except ValidationError as error:
        raise explain_problems(error, Job, source) from None
    return _with_absolute_paths(job, (folder or Path()).absolute())


def dump_job(job: Job) -> str:
    """The job as YAML, with all defaults."""
    return yaml.safe_dump(job.model_dump(exclude_none=True), sort_keys=False, width=120)


def _with_absolute_paths(job: Job, folder: Path) -> Job:
    train: dict[str, Any] = {"output_dir": _written_to(job.train.output_dir, "train.output_dir")}
    if job.train.drawn is not None:
        rewards = [_file_beside(reference, folder) for reference in job.train.drawn.rewards]
        train[job.train.method] = job.train.drawn.model_copy(update={"reward": rewards})
    if job.train.frozen is not None:
        train["frozen"] = beside_job(job.train.frozen, folder)
    return job.model_copy(
        update={
            "model": job.model.beside(folder),
            "data": _beside(job.data, folder),
            "train": job.train.model_copy(update=train),
        }
    )


def _written_to(name: str, key: str) -> str:
    """The absolute path of a folder that may be made.

    Raises:
        JobFileError: it names a variable or a home that there isn't: nobody wants a folder of that name.
    """
    check_variables(name, key)
    return str(at_home(name).absolute())


def _file_beside(reference: str, folder: Path) -> str:
    """``file.py:function`` with the file's path looked up; ``module:function`` as it is."""
    where, colon, name = reference.rpartition(":")
    return f"{_beside_job(where, folder)}{colon}{name}" if where.endswith(".py") else reference


def _beside(data: DataSection, folder: Path) -> DataSection:
    """The section with its relative paths looked up in ``folder`` first, then in the working directory."""
    paths: dict[str, Any] = {}
    if data.chat_template is not None:
        paths["chat_template"] = _beside_job(data.chat_template, folder)
    if isinstance(data.cache, str):
        paths["cache"] = _written_to(data.cache, "data.cache")
    named = data.renamed(lambda key, name, _: name if name in (STDLIB, BYTES) else _beside_job(name, folder))
    return named.model_copy(update=paths)


def _beside_job(name: str, folder: Path) -> str:
    """As :func:`beside_job`; what is nowhere and no Hub id would be in ``folder``, where errors find what is alike."""
    found = beside_job(name, folder)
    return found if is_hub_id(found) else str(folder / at_home(found))


def apply_overrides(data: Mapping[str, Any], assignments: Iterable[str]) -> dict[str, Any]:
    """A copy of ``data`` with every ``path=value`` of ``assignments`` applied; values are parsed as YAML.

    Raises:
        UnknownNameError: a job has no such path; the message suggests the nearest one.
        ConfigError: an assignment has no ``=``, or its path goes through a value that isn't a mapping.
        JobFileError: a value isn't valid YAML.
    """
    read = read_assignments(assignments)
    for assignment in read:
        check_assignment(assignment, Job)
    return assigned(data, read)
