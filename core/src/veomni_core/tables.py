"""Plain-text tables, made with rich, for reports that are printed, logged or written to files."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence


def render_table(columns: Sequence[str], rows: Iterable[Sequence[str]], title: str = "", width: int = 140) -> str:
    """A table as text without colours, at most ``width`` characters wide."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title or None, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(cell.replace("[", "\\[") for cell in row))
    text = io.StringIO()
    Console(file=text, width=width, color_system=None, force_terminal=False).print(table)
    return text.getvalue().rstrip("\n")
