"""Plain-text tables, made with rich, for reports that are printed, logged or written to files.

Every word stays whole, since a reader copies names and paths from a table. A table whose longest words don't fit the
terminal is printed as records, one block per row, as `psql` prints one after ``\\x``.
"""

from __future__ import annotations

import io
import os
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from veomni_core.random_states import random_states_kept

_PAGE = 140  # the width of a table that goes to no terminal, unless its words need more
_BORDER = 3  # columns of a border and of the spaces around a cell
_INDENT = "  "
_WHOLE_WORDS: Any = {"break_long_words": False, "break_on_hyphens": False}  # arguments of textwrap


def terminal_width() -> int | None:
    """The columns that output must keep to: ``COLUMNS``, or those of the terminal that standard output goes to.

    ``None`` if it goes to a pipe, a file or a log, where lines may be of any length.
    """
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns):
        return int(columns)
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or None  # 0: a terminal that doesn't know its size
    except (AttributeError, OSError, ValueError):
        return None


def render_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], title: str = "", width: int | None = None
) -> str:
    """A table as text without colours.

    Args:
        columns: the columns' names.
        rows: the cells of each row. A cell may have several lines.
        title: lines above the table.
        width: the characters that a line may have; those of the terminal without it. In a pipe, a file or a log a
            table gets as wide as its words need.

    Example:
        >>> print(render_table(("op", "kernel"), [("rms_norm", "torch"), ("attention", "sdpa")], width=40))
        ┏━━━━━━━━━━━┳━━━━━━━━┓
        ┃ op        ┃ kernel ┃
        ┡━━━━━━━━━━━╇━━━━━━━━┩
        │ rms_norm  │ torch  │
        │ attention │ sdpa   │
        └───────────┴────────┘
        >>> print(render_table(("op", "kernel"), [("rms_norm", "torch"), ("attention", "sdpa")], width=20))
        op      rms_norm
        kernel  torch
        <BLANKLINE>
        op      attention
        kernel  sdpa
    """
    body = [tuple(row) for row in rows]
    limit = width or terminal_width()
    cells = list(zip(columns, *body, strict=True))  # by column
    words = [max(map(_longest_word, column)) for column in cells]
    borders = _BORDER * len(cells) + 1
    needed = sum(words) + borders
    if limit is not None and needed > limit:
        return "\n\n".join(filter(None, [fit(title, limit), _records(columns, body, limit)]))
    room = max(limit or _PAGE, needed) - borders
    return "\n".join(filter(None, [fit(title, limit), _grid(columns, body, _column_widths(cells, words, room))]))


def fit(text: str, width: int | None = None) -> str:
    """``text`` with its lines broken between words where they are longer than ``width``, or than the terminal's."""
    limit = width or terminal_width()
    if limit is None:
        return text
    return "\n".join(
        textwrap.fill(line, limit, subsequent_indent=_INDENT + line[: -len(line.lstrip()) or None], **_WHOLE_WORDS)
        for line in text.splitlines()
    )


def _column_widths(cells: Sequence[Sequence[str]], words: Sequence[int], room: int) -> list[int]:
    """How wide each column is, ``room`` in all at most. The widest are narrowed, none below its longest word."""
    lines = [max(_width(line) for cell in column for line in cell.splitlines() or [""]) for column in cells]
    level = max(lines)
    while True:
        widths = [min(line, max(word, level)) for word, line in zip(words, lines, strict=True)]
        if sum(widths) <= room:
            return widths
        level -= 1


def _grid(columns: Sequence[str], rows: Iterable[Sequence[str]], widths: Sequence[int]) -> str:
    with random_states_kept(only_while_alone=True):  # rich draws from Python's random as it is imported
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

    table = Table()
    for column, width in zip(columns, widths, strict=True):
        table.add_column(Text(column), width=width)
    for row in rows:
        table.add_row(*map(Text, row))
    text = io.StringIO()
    whole = sum(widths) + _BORDER * len(widths) + 1
    Console(file=text, width=whole, color_system=None, force_terminal=False).print(table)
    return text.getvalue().rstrip("\n")


def _records(columns: Sequence[str], rows: Iterable[Sequence[str]], limit: int) -> str:
    """One block per row: a line for each cell that isn't empty, after its column's name."""
    names = max(map(len, columns)) + len(_INDENT)
    return "\n\n".join(
        "\n".join(_named(column, cell, names, limit) for column, cell in zip(columns, row, strict=True) if cell.strip())
        for row in rows
    )


def _named(column: str, cell: str, names: int, limit: int) -> str:
    """A cell beside its column's name, which is ``names`` wide; below the name, if its longest word fits only there."""
    beside = names + _longest_word(cell) <= limit
    indent = " " * names if beside else _INDENT
    lines = [part for line in cell.splitlines() for part in textwrap.wrap(line, limit - len(indent), **_WHOLE_WORDS)]
    return (f"{column:{names}}" if beside else f"{column}\n{indent}") + f"\n{indent}".join(lines)


def _longest_word(text: str) -> int:
    return max(map(_width, text.split()), default=0)


def _width(text: str) -> int:
    """How many columns of a terminal ``text`` takes: a Chinese character takes two."""
    from rich.cells import cell_len

    return cell_len(text)
