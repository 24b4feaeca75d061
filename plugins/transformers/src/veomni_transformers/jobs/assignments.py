"""``--set a.b=c``: changes single values of a job from the command line, as if its YAML contained them.

Which paths a job may have is for the plugin that runs it to say.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from veomni_core.errors import ConfigError
from veomni_core.jobs.jobfile import parse_yaml
from veomni_transformers.jobs.job_files import shown


@dataclass(frozen=True)
class Assignment:
    """One ``path=value``, with the value as YAML reads it."""

    path: str
    value: Any

    @property
    def parts(self) -> list[str]:
        """The keys that lead to the value."""
        return self.path.split(".")


def read_assignments(texts: Iterable[str]) -> list[Assignment]:
    """The assignments that ``texts``, the values of ``--set``, spell out.

    Raises:
        ConfigError: one has no path, or no ``=``.
        JobFileError: a value isn't valid YAML.
    """
    assignments = []
    for text in texts:
        path, equals, value = text.partition("=")
        path = path.strip()
        if not equals or not path:
            raise ConfigError(f"--set {text}: write it as path=value, e.g. --set train.steps=100")
        assignments.append(Assignment(path, parse_yaml(value, f"--set {path}")))
    return assignments


def assigned(job: Mapping[str, Any], assignments: Iterable[Assignment]) -> dict[str, Any]:
    """A copy of ``job`` with every assignment made, in their order.

    Raises:
        ConfigError: a path goes through a value that isn't a mapping.
    """
    changed = copy.deepcopy(dict(job))
    for assignment in assignments:
        _assign(changed, assignment)
    return changed


def _assign(job: dict[str, Any], assignment: Assignment) -> None:
    target = job
    *sections, key = assignment.parts
    for depth, section in enumerate(sections, start=1):
        if target.get(section) is None:
            target[section] = {}
        if not isinstance(target[section], dict):
            where = ".".join(sections[:depth])
            raise ConfigError(
                f"--set {assignment.path}: {where} is not a mapping in this job, but {shown(target[section])}"
            )
        target = target[section]
    target[key] = assignment.value
