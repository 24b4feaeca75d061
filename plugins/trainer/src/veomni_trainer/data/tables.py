"""Tables as rows of Python values: JSON lines, JSON and CSV. ``dataset_tables`` has those that ``datasets`` reads.

Its readers of text formats can't leave out a bad line, take ``007`` for 7, and give all rows the keys of each.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, Self, TypeAlias

from veomni_core.commands import shown
from veomni_trainer.data.messages import check_characters, parse_json
from veomni_trainer.data.reading import BadLine, Unreadable
from veomni_trainer.data.text import read_lines, read_text

Row: TypeAlias = Mapping[str, Any]
TEXT, TURNS, LIST, OTHER = "text", "turns", "list", "other"  # what a column holds
TURN = ("role", "from")  # a list of mappings with one of these keys holds the turns of a chat

_LARGEST_FIELD = 2**31 - 1


class ClassNumber(int):
    """The number of a class that has a name.

    Attributes:
        name: its name; empty where the number is no class, as -1.
    """

    name: str

    def __new__(cls, number: int, names: Sequence[str]) -> Self:
        one = super().__new__(cls, number)
        one.name = names[number] if 0 <= number < len(names) else ""
        return one


class Table(Protocol):
    """A file of rows."""

    unit: str
    """What its numbers count: ``line`` or ``row``."""
    has_schema: bool
    """Whether all rows have the same columns."""

    def columns(self) -> dict[str, str]:
        """The names of its columns, and what each holds: ``text``, ``turns``, ``list`` or ``other``.

        Without a schema they are those of the first good row.

        Raises:
            Unreadable: the file isn't of its format.
        """
        ...

    def rows(self, names: Collection[str]) -> Iterator[tuple[int, Row | BadLine]]:
        """Every row with its number, from 1; at least its columns ``names``, where it has them.

        Raises:
            Unreadable: the file isn't of its format, or is damaged.
        """
        ...


class JsonLinesTable:
    """A JSON object per line. Blank lines are no rows."""

    unit, has_schema = "line", False

    def __init__(self, path: Path) -> None:
        self._path = path

    def columns(self) -> dict[str, str]:
        first: Row = next((row for _, row in self.rows(()) if row and not isinstance(row, BadLine)), {})
        return {name: kind_of(value) for name, value in first.items()}

    def rows(self, names: Collection[str]) -> Iterator[tuple[int, Row | BadLine]]:
        for number, line in read_lines(self._path):
            if isinstance(line, BadLine):
                yield number, line
            elif line.strip():
                if number == 1 and line.lstrip().startswith("["):
                    raise Unreadable("holds a JSON list, and no object per line; write data.format: json")
                yield number, _parse_object(line.rstrip())


class JsonTable(JsonLinesTable):
    """A JSON file with a list of objects, or with ``{"data": [...]}``. It is read whole."""

    unit = "row"

    def rows(self, names: Collection[str]) -> Iterator[tuple[int, Row | BadLine]]:
        for number, row in enumerate(self._rows, start=1):
            yield number, _as_row(row, "be")

    @cached_property
    def _rows(self) -> list[Any]:
        text = read_text(self._path).removeprefix("\ufeff")
        try:
            value = parse_json(text)
        except (ValueError, RecursionError) as error:
            first, _, rest = text.strip().partition("\n")
            if rest and isinstance(_parse_object(first), dict):
                raise Unreadable("holds a JSON object per line; write data.format: jsonl") from None
            raise Unreadable(f"is not JSON: {_where(error)}") from None
        rows = value.get("data") if isinstance(value, dict) else value
        if isinstance(rows, list):
            return rows
        raise Unreadable(
            'holds neither a list of objects nor {"data": [...]}. Convert it, or write data.format: text to train on '
            "its characters"
        )


class CsvTable:
    """Values under a header, separated by one character. Every value is text: ``007`` stays ``007``.

    A quoted value may hold line breaks, but not between tabs: there a quotation mark is more often part of a text.

    Args:
        path: the file.
        delimiter: the character between two values.
        is_written: whether the job names the character.
    """

    unit, has_schema = "line", True

    def __init__(self, path: Path, delimiter: str, is_written: bool = False) -> None:
        self._path, self._delimiter, self._is_written = path, delimiter, is_written

    def columns(self) -> dict[str, str]:
        return dict.fromkeys(next(self._records())[1], TEXT)

    def rows(self, names: Collection[str]) -> Iterator[tuple[int, Row | BadLine]]:
        records = self._records()
        header = next(records)[1]
        for number, values in records:
            if isinstance(values, BadLine):
                yield number, values
            elif len(values) == len(header):
                yield number, dict(zip(header, values, strict=True))
            elif values:  # csv gives an empty list for a blank line
                yield number, BadLine(f"{len(values)} values, and the header has {len(header)}")

    def _records(self) -> Iterator[tuple[int, Any]]:
        """The header as a list of names, then a list of values or a :class:`BadLine` for each record.

        A record is numbered by its last line.
        """
        csv.field_size_limit(_LARGEST_FIELD)  # of the process; by default fields above 128 KiB are errors
        records = self._single_lines() if self._delimiter == "\t" else self._quoted_lines()
        is_header = True
        for number, values in records:
            if is_header and number == 1 and values == ["sep=", ""]:
                continue  # as spreadsheets write it
            if is_header:
                _check_header(values)
                self._check_delimiter(values)
                is_header = False
            yield number, values
        if is_header:
            raise Unreadable("has no header; its first line names the columns")

    def _quoted_lines(self) -> Iterator[tuple[int, list[str] | BadLine]]:
        reader = csv.reader(self._lines(), delimiter=self._delimiter, strict=True)
        while True:
            try:
                values: list[str] | BadLine = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                values = BadLine(f"not CSV: {error}")
            yield reader.line_num, values

    def _single_lines(self) -> Iterator[tuple[int, list[str] | BadLine]]:
        for number, line in enumerate(self._lines(), start=1):
            try:
                yield number, next(csv.reader([line], delimiter="\t", strict=True))
            except csv.Error:
                what = "a value begins with a quotation mark that doesn't close it in this line; double the marks"
                yield number, BadLine(f'not TSV: {what}, as """Hi"" she said", or write JSON lines')

    def _check_delimiter(self, header: Any) -> None:
        """Refuse to take a table with another delimiter for one of a single column."""
        others = [each for each in ";|\t," if each in header[0]] if len(header) == 1 and not self._is_written else []
        if others or header[0].startswith("sep="):
            looks = header[0].removeprefix("sep=")[:1] if header[0].startswith("sep=") else others[0]
            raise Unreadable(
                f"has one column, {header[0]!r}. Its values seem to be separated by {looks!r}: write data.separator: "
                f"{looks!r}, or the character that separates them"
            )

    def _lines(self) -> Iterator[str]:
        """The lines, as ``csv`` wants them. A line in another encoding ends what it can read."""
        for number, line in read_lines(self._path):
            if isinstance(line, BadLine):
                raise Unreadable(f"can't be read: line {number}: {line}")
            yield line


def _check_header(names: list[str] | BadLine) -> None:
    if isinstance(names, BadLine):
        raise Unreadable(f"has no header: its first line: {names}")
    if not names:
        raise Unreadable("has no header: its first line is blank")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise Unreadable(f"names columns twice in its header: {', '.join(twice)}")


def kind_of(value: Any) -> str:
    """What a column holds whose first value is this one."""
    if not isinstance(value, list):
        return TEXT if isinstance(value, str) else OTHER
    turns = value and all(isinstance(each, dict) and any(key in each for key in TURN) for each in value)
    return TURNS if turns else LIST


def _parse_object(line: str) -> Row | BadLine:
    try:
        value = parse_json(line)
    except (ValueError, RecursionError) as error:
        return BadLine(f"not JSON: {_where(error)}")
    return _as_row(value, "hold")


def _as_row(value: Any, must: str) -> Row | BadLine:
    if not isinstance(value, dict):
        return BadLine(f"must {must} an object, got {shown(value)}")
    try:
        check_characters("".join(value), "the name of a column")
    except BadLine as problem:
        return problem
    return value


def _where(error: Exception) -> str:
    if not isinstance(error, json.JSONDecodeError):
        return str(error)
    line = f"line {error.lineno}, " if error.lineno > 1 else ""
    return f"{error.msg.removesuffix(' at')} at {line}column {error.colno}"
