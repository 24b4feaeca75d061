"""Docstrings and tables as Markdown."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

_SECTION = re.compile(r"^(Args|Returns|Raises|Example|Attributes):", re.MULTILINE)
_ROLE = re.compile(r":\w+:`~?([^`]+)`")


def prose(documented: Any) -> str:
    """What a docstring says before its first section, each paragraph and each item of a list on one line."""
    text = _SECTION.split(inspect.getdoc(documented) or "")[0].strip()
    joined = re.sub(r"(?<!\n)\n(?!\n|- )\s*", " ", text)
    return _ROLE.sub(_last_name, joined).replace("``", "`")


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """The lines of a table; a cell's own bars are escaped."""
    yield f"| {' | '.join(columns)} |"
    yield "|" + "---|" * len(columns)
    for row in rows:
        yield f"| {' | '.join(' '.join(cell.split()).replace('|', chr(92) + '|') for cell in row)} |"


def _last_name(role: re.Match[str]) -> str:
    return f"`{role[1].rpartition('.')[2]}`"
