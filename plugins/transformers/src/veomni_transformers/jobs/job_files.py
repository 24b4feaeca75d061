"""The files that a job names, and what errors say of a job file: its values, and all that is wrong in it at once."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from veomni_core.errors import JobFileError
from veomni_core.jobs.jobfile import at_home


def job_file_error(source: str, problems: Mapping[str, str]) -> JobFileError:
    """One error for all ``problems`` of the job in ``source``.

    ``problems`` maps the dotted path of each key (empty for the whole job) to what is wrong with it.
    """
    lines = [f"{path}: {problem}" if path else problem for path, problem in problems.items()]
    if len(lines) == 1:
        return JobFileError(f"{source}: {lines[0]}")
    return JobFileError(f"{source}: {len(lines)} problems\n" + "\n".join(f"  - {line}" for line in lines))


def beside_job(name: str, folder: Path) -> str:
    """The path or glob ``name``, made absolute in ``folder`` or else in the working directory.

    Returned unchanged if it exists in neither.

    Raises:
        JobFileError: it exists in neither, and names a variable or a user's home that there isn't.
    """
    if "\0" in name:  # no path has it, and glob raises
        return name
    candidates = [str(base / at_home(name)) for base in (folder.absolute(), Path.cwd())]
    for path in candidates:
        if os.path.lexists(path) or any(glob.iglob(path, recursive=True)):
            return path
    check_variables(name)
    return name


def check_variables(name: str, key: str = "model, data or train") -> None:
    """Check that the path ``name`` of the job's ``key`` has no variable or user's home that there isn't.

    Raises:
        JobFileError: it has one.
    """
    if missing := re.search(r"\$\{?\w+\}?|^~[^/]*", str(at_home(name))):
        raise JobFileError(
            f"{key}: {name} names {missing[0]}, and there is no such variable of the environment or home of a user"
        )


def first_line(error: BaseException) -> str:
    """What went wrong, in one line; of an error without words, its type."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def shown(value: Any) -> str:
    """A value and its type, with the type's name in YAML: ``3 (integer)``."""
    names = {bool: "true/false", int: "integer", float: "number", str: "text", list: "list", dict: "mapping"}
    if value is None:
        return "nothing"
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({names.get(type(value), type(value).__name__)})"
