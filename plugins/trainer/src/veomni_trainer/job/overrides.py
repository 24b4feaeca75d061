"""``--set a.b=c``: changes single values of a job from the command line, as if its YAML contained them."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

from veomni_core.errors import ConfigError, UnknownNameError, did_you_mean
from veomni_core.jobs.jobfile import parse_yaml, shown
from veomni_trainer.job.problems import is_free_mapping, keys_of, known_paths, no_such_key, section_at
from veomni_trainer.job.schema import Job


def apply_overrides(data: Mapping[str, Any], assignments: Iterable[str]) -> dict[str, Any]:
    """A copy of ``data`` with every ``path=value`` of ``assignments`` applied; values are parsed as YAML.

    Raises:
        UnknownNameError: a job has no such path; the message suggests the nearest one.
        ConfigError: an assignment has no ``=``, or its path goes through a value that isn't a mapping.
        JobFileError: a value isn't valid YAML.
    """
    job = copy.deepcopy(dict(data))
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        path = path.strip()
        if not equals or not path:
            raise ConfigError(f"--set {assignment}: write it as path=value, e.g. --set train.steps=100")
        parts = path.split(".")
        _check_path(path, parts)
        _write(job, path, parts, parse_yaml(text, f"--set {path}"))
    return job


def _check_path(path: str, parts: list[str]) -> None:
    for depth in range(1, len(parts) + 1):
        parent = section_at(Job, parts[: depth - 1])
        if parent is None:
            if is_free_mapping(Job, parts[: depth - 1]):
                return
            raise UnknownNameError(f"--set {path}: {'.'.join(parts[: depth - 1])} holds a value, not a section")
        if parts[depth - 1] not in keys_of(parent):
            raise UnknownNameError(f"--set {path}: {no_such_key(path, did_you_mean(path, known_paths(Job)))}")


def _write(job: dict[str, Any], path: str, parts: list[str], value: Any) -> None:
    target = job
    for depth, part in enumerate(parts[:-1], start=1):
        if target.get(part) is None:
            target[part] = {}
        if not isinstance(target[part], dict):
            where = ".".join(parts[:depth])
            raise ConfigError(f"--set {path}: {where} is not a mapping in this job, but {shown(target[part])}")
        target = target[part]
    target[parts[-1]] = value
