"""``--set a.b=c`` for a training job: only paths that a job may have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from veomni_core.errors import UnknownNameError, did_you_mean
from veomni_trainer.job.problems import is_free_mapping, keys_of, known_paths, no_such_key, section_at
from veomni_trainer.job.schema import Job
from veomni_trainer.job.synonyms import SYNONYMS
from veomni_transformers.jobs.assignments import Assignment, assigned, read_assignments


def apply_overrides(data: Mapping[str, Any], assignments: Iterable[str]) -> dict[str, Any]:
    """A copy of ``data`` with every ``path=value`` of ``assignments`` applied; values are parsed as YAML.

    Raises:
        UnknownNameError: a job has no such path; the message suggests the nearest one.
        ConfigError: an assignment has no ``=``, or its path goes through a value that isn't a mapping.
        JobFileError: a value isn't valid YAML.
    """
    read = read_assignments(assignments)
    for assignment in read:
        _check_path(assignment)
    return assigned(data, read)


def _check_path(assignment: Assignment) -> None:
    path, parts = assignment.path, assignment.parts
    for depth in range(1, len(parts) + 1):
        parent = section_at(Job, parts[: depth - 1])
        if parent is None:
            if is_free_mapping(Job, parts[: depth - 1]):
                return
            raise UnknownNameError(f"--set {path}: {'.'.join(parts[: depth - 1])} holds a value, not a section")
        if parts[depth - 1] not in keys_of(parent):
            raise UnknownNameError(f"--set {path}: {no_such_key(path, did_you_mean(path, known_paths(Job), SYNONYMS))}")
