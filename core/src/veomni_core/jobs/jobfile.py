"""Reads YAML job files strictly: duplicate keys and syntax errors raise, with line and column."""

from __future__ import annotations

import glob
import os
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import yaml

from veomni_core.errors import JobFileError


class _StrictLoader(yaml.SafeLoader):
    """PyYAML's safe loader, but duplicate keys raise. PyYAML itself silently takes the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: dict[Hashable, yaml.Mark] = {}
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable) and key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} appears twice, first in line {seen[key].line + 1}", key_node.start_mark
                )
            seen[key] = key_node.start_mark
        return super().construct_mapping(node, deep=deep)


def parse_yaml(text: str, source: str = "YAML") -> Any:
    """Parse the YAML ``text``. Errors call it ``source``.

    Raises:
        JobFileError: a syntax error or a duplicate key; the message gives line and column.
    """
    try:
        return yaml.load(text, Loader=_StrictLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise JobFileError(f"{source}{where}: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise JobFileError(f"{source}: {error}") from None


def load_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping in the job file ``path``.

    Raises:
        JobFileError: the file is missing, is not UTF-8, is not valid YAML, or holds something other than a mapping.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise JobFileError(f"{path}: there is no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise JobFileError(f"{path}: cannot be read as text: {error}") from None
    value = parse_yaml(text, str(path))
    if not isinstance(value, dict):
        found = "is empty" if value is None else f"holds a {type(value).__name__}"
        raise JobFileError(f"{path}: a job file is a mapping of sections such as model, data and train; this {found}")
    return value


def job_file_error(source: str, problems: Mapping[str, str]) -> JobFileError:
    """One error for all ``problems`` of the job in ``source``.

    ``problems`` maps the dotted path of each key (empty for the whole job) to what is wrong with it.
    """
    lines = [f"{path}: {problem}" if path else problem for path, problem in problems.items()]
    if len(lines) == 1:
        return JobFileError(f"{source}: {lines[0]}")
    return JobFileError(f"{source}: {len(lines)} problems\n" + "\n".join(f"  - {line}" for line in lines))


def shown(value: Any) -> str:
    """A value and its type, with the type's name in YAML: ``3 (integer)``."""
    names = {bool: "true/false", int: "integer", float: "number", str: "text", list: "list", dict: "mapping"}
    if value is None:
        return "nothing"
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({names.get(type(value), type(value).__name__)})"


def beside_job(name: str, folder: Path) -> str:
    """The path or glob ``name``, made absolute in ``folder`` or else in the working directory.

    Returned unchanged if it exists in neither.
    """
    candidates = [str(base / Path(name).expanduser()) for base in (folder.absolute(), Path.cwd())]
    return next((path for path in candidates if os.path.lexists(path) or any(glob.iglob(path, recursive=True))), name)
