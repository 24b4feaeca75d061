"""Reads YAML job files strictly: duplicate keys and syntax errors raise, with line and column."""

from __future__ import annotations

import os
import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from veomni_core.errors import JobFileError

_MOST_VALUES = 1_000_000  # that a file may stand for, once its aliases are followed
_SURROGATE = re.compile("[\ud800-\udfff]")
_NO_VALUE = (ValueError, TypeError, KeyError, AttributeError)  # PyYAML's constructors raise them of a date, a number, …


class _StrictLoader(yaml.SafeLoader):
    """PyYAML's safe loader, but duplicate keys raise. PyYAML itself silently takes the last one.

    So do aliases that lead back to themselves, or multiply to more values than any job has, and values that are none.
    """

    def get_single_node(self) -> yaml.Node | None:
        node: yaml.Node | None = super().get_single_node()
        if node is not None:
            _count_values(node, {})
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep=deep)
        except _NO_VALUE as error:
            kind = node.tag.rpartition(":")[2]
            raise _problem(f"{str(node.value)[:60]!r} can't be read as {kind}: {error!r}"[:300], node) from None
        if isinstance(value, int) and abs(value) >= 2**64:
            advice = "write it with a point if it needs no digit of them"
            raise _problem(f"this number has more than 64 bits; {advice}", node)
        if isinstance(value, str) and _SURROGATE.search(value):
            raise _problem(f"{value!r} holds half of a surrogate pair, which is no character", node)
        return value

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
        seen: dict[Hashable, yaml.Mark] = {}
        for key_node, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                raise _problem(f"{key!r} can't be a key; keys are text", key_node)
            if key in seen:
                raise _problem(f"key {key!r} appears twice, first in line {seen[key].line + 1}", key_node)
            seen[key] = key_node.start_mark
        return super().construct_mapping(node, deep=deep)


def _problem(text: str, node: yaml.Node) -> yaml.constructor.ConstructorError:
    return yaml.constructor.ConstructorError(None, None, text, node.start_mark)


def _count_values(node: yaml.Node, known: dict[int, int]) -> int:
    """How many values ``node`` stands for. ``known`` has those of the nodes before it, and 0 for those around it."""
    if id(node) in known:
        if not known[id(node)]:
            raise _problem("an alias leads back to the value that it is in", node)
        return known[id(node)]
    known[id(node)] = 0
    parts = node.value if isinstance(node, yaml.CollectionNode) else ()
    inner = [each for part in parts for each in (part if isinstance(part, tuple) else (part,))]
    number = 1 + sum(_count_values(each, known) for each in inner)
    if number > _MOST_VALUES:
        raise _problem(
            f"its aliases multiply to more than {_MOST_VALUES:,} values; write out those that are needed", node
        )
    known[id(node)] = number
    return number


def parse_yaml(text: str, source: str = "YAML") -> Any:
    """Parse the YAML ``text``. Errors call it ``source``.

    Raises:
        JobFileError: a syntax error, a duplicate key, or a value that can't be read; the message gives line and column.
    """
    try:
        return yaml.load(text, Loader=_StrictLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise JobFileError(f"{source}{where}: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise JobFileError(f"{source}: {error}") from None
    except RecursionError:
        raise JobFileError(f"{source}: it is nested too deeply to be read; no job needs that") from None


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
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, or no path
        raise JobFileError(f"{str(path)!r}: cannot be read as text: {error}") from None
    value = parse_yaml(text, str(path))
    if not isinstance(value, dict):
        found = "is empty" if value is None else f"holds a {type(value).__name__}"
        raise JobFileError(f"{path}: a job file is a mapping of sections such as model, data and train; this {found}")
    return value


def at_home(name: str | Path) -> Path:
    """The path ``name`` with ``~`` and ``$VARIABLE`` replaced; each stays where there is no such home or variable."""
    return Path(os.path.expandvars(os.path.expanduser(name)))  # Path.expanduser raises a RuntimeError there
