"""What was read of one source and what was left out; and the two ways in which reading fails."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

_SHOWN = 3
_KEPT = 10


class BadLine(Exception):
    """A line or row can't be read, for the reason in the message. ``data.bad_lines: skip`` leaves it out."""


class Unreadable(Exception):
    """A file can't be read, or not as the job says; the message continues a sentence that begins with its path."""


@dataclass
class Reading:
    """Counts what was read of the files that one key of the job names, and what was left out.

    Attributes:
        key: the key of the job, such as ``data.files``.
        documents: how many were read; of text files, one each.
        files: how many files were read, by format.
        columns: what of a table was read, in words; empty for text files.
        skipped: the paths of files that were left out, by reason.
        empty_rows: how many rows were left out since their text is empty.
        bad_lines: how many lines were left out since they can't be read.
        first_bad_lines: where the first of them are, and what is wrong with them.
    """

    key: str = "data.files"
    documents: int = 0
    files: dict[str, int] = field(default_factory=dict)
    columns: str = ""
    skipped: dict[str, list[str]] = field(default_factory=dict)
    empty_rows: int = 0
    bad_lines: int = 0
    first_bad_lines: list[str] = field(default_factory=list)

    def read_file(self, file_format: str) -> None:
        """Count a file that was read."""
        self.files[file_format] = self.files.get(file_format, 0) + 1

    def skip_file(self, path: Path, reason: str) -> None:
        """Count a file that is left out. The part of ``reason`` before a colon is the same for all such files."""
        self.skipped.setdefault(reason.removeprefix("is ").partition(":")[0], []).append(str(path))

    def skip_line(self, problem: str) -> None:
        """Count a bad line; ``problem`` names its file and number."""
        self.bad_lines += 1
        if len(self.first_bad_lines) < _KEPT:
            self.first_bad_lines.append(problem)

    def describe(self) -> str:
        """``674 files; left out: 2 not UTF-8 text (a.bin, ...), 1 empty (b.txt)``."""
        return "; ".join([self._what(), *self._left_out()])

    def to_dict(self) -> dict[str, Any]:
        """The counts, as JSON can hold them."""
        return asdict(self)

    def _what(self) -> str:
        if not self.columns:
            return f"{sum(self.files.values()):,} files"
        files = ", ".join(f"{count:,} {name}" for name, count in self.files.items())
        return f"{files}: {self.documents:,} documents, {self.columns}"

    def _left_out(self) -> Iterable[str]:
        files = [f"{len(paths)} {reason} ({_some(paths)})" for reason, paths in self.skipped.items()]
        if self.empty_rows:
            files.append(f"{self.empty_rows:,} rows without text")
        if self.bad_lines:
            first = self.first_bad_lines[:_SHOWN]
            more = ["..."] if self.bad_lines > len(first) else []
            files.append(f"{self.bad_lines:,} bad lines ({'; '.join([*first, *more])})")
        return [f"left out: {', '.join(files)}"] if files else []


def _some(paths: list[str]) -> str:
    return ", ".join(Path(path).name for path in paths[:_SHOWN]) + (", ..." if len(paths) > _SHOWN else "")
