"""What was read of one source, what was left out, and what became of it; and the two ways in which reading fails."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from veomni_trainer.data.documents import Example

_SHOWN = 3
_KEPT = 10
_LONGEST = 70  # characters of a sample


class BadLine(Exception):
    """A line or row can't be read, for the reason in the message. ``data.bad_lines: skip`` leaves it out."""


class BadMedia(BadLine):
    """An image, a video or audio of a row can't be read. ``data.media_errors: skip`` leaves the row out."""


class Unreadable(Exception):
    """A file can't be read, or not as the job says; the message continues a sentence that begins with its path."""


@dataclass
class Reading:
    """Counts what was read of the files that one key of the job names, what was left out, and what became of it.

    Attributes:
        key: the key of the job, such as ``data.files``.
        documents: how many were read; of text files, one each.
        files: how many files were read, by format.
        columns: what of a table was read, in words; empty for text files.
        unused: the names of the columns of the first table that are not read.
        sample: the first row, shortened; what is learned of it comes after an arrow, if not all is.
        ends: how many documents are learned to end with which token, by its id; ``-1``: with none.
        left_unrendered: how often a chat template left something of a turn out, by what it is.
        skipped: the paths of files that were left out, by reason.
        empty_rows: how many rows were left out since their text is empty.
        bad_lines: how many lines were left out since they can't be read.
        first_bad_lines: where the first of them are, and what is wrong with them.
        media: how many images, videos and audio were read, by kind.
        media_tokens: how many tokens of the documents stand for them.
        bad_media: how many rows were left out since one of those can't be read.
        pictures: the first images, ``{"picture": a small one as a data URI, "text": what goes with it}``.
        tokens: how many the documents have.
        checksum: of these tokens, and of which are learned; empty of rows.
        sequences: how many sequences they are, those for validation included.
        what: what the sequences are; rows for a method's trainer have no tokens yet.
        left_over: how many tokens at the end are too few for one more sequence.
        truncated: how many documents were cut off.
        fill_rate: of packed sequences, the part that is not padding.
        learned: how many labels are learned.
        learned_whole: how many would be, if no document were cut off.
        media_cut_off: how many documents were left out, since their media would be cut off.
        weight: how often it is drawn, relative to other sources.
        training: how many sequences an epoch trains on.
        validation: how many are validated on.
        learned_validation: how many of the learned labels are those of the latter.
        epochs: how often a training goes through it, on average over all seeds; ``None`` where nothing is drawn.
    """

    key: str = "data.files"
    documents: int = 0
    files: Counter[str] = field(default_factory=Counter)
    columns: str = ""
    unused: list[str] = field(default_factory=list)
    sample: str = ""
    ends: Counter[str] = field(default_factory=Counter)
    left_unrendered: Counter[str] = field(default_factory=Counter)
    skipped: dict[str, list[str]] = field(default_factory=dict)
    empty_rows: int = 0
    bad_lines: int = 0
    first_bad_lines: list[str] = field(default_factory=list)
    media: Counter[str] = field(default_factory=Counter)
    media_tokens: int = 0
    bad_media: int = 0
    pictures: list[dict[str, str]] = field(default_factory=list)
    tokens: int = 0
    checksum: str = ""
    sequences: int = 0
    what: str = "sequences"
    left_over: int = 0
    truncated: int = 0
    fill_rate: float | None = None
    learned: int = 0
    learned_whole: int = 0
    media_cut_off: int = 0
    weight: float = 1.0
    training: int = 0
    validation: int = 0
    learned_validation: int = 0
    epochs: float | None = None

    def skip_file(self, path: Path, reason: str) -> None:
        """Count a file that is left out. The part of ``reason`` before a colon is the same for all such files."""
        self.skipped.setdefault(reason.removeprefix("is ").partition(":")[0], []).append(str(path))

    def skip_line(self, problem: str, is_media: bool = False) -> None:
        """Count a bad line; ``problem`` names its file and number."""
        self.bad_lines += 1
        self.bad_media += is_media
        if len(self.first_bad_lines) < _KEPT:
            self.first_bad_lines.append(problem)

    def show(self, example: Example) -> None:
        """Keep the first example, for the user to see how rows are read."""
        if not self.sample:
            start = example.learned[0][0] if example.learned else 0
            before = f"{_shortened(example.text[:start])} -> " if start else ""
            end = example.learned[0][1] if example.learned else len(example.text)
            self.sample = f"{before}{_shortened(example.text[start:end])}"

    def count_end(self, token: int | None) -> None:
        """Count the token with which a document is learned to end."""
        self.ends[str(-1 if token is None else token)] += 1  # text, as in JSON

    def not_rendered(self, what: str) -> None:
        """Count something of a turn that the chat template left out."""
        self.left_unrendered[what] += 1

    def details(self) -> list[str]:
        """A line each for the first row, for columns that are not read, and for what the chat template left out."""
        left = ", ".join(f"{what} ({count:,} turns)" for what, count in self.left_unrendered.items())
        return [
            *([f"first row: {self.sample}"] if self.sample else ()),
            *([f"columns that are not read: {', '.join(self.unused)}"] if self.unused else ()),
            *([f"not in the chat template's text: {left}"] if left else ()),
        ]

    def describe(self) -> str:
        """``674 files; left out: 2 not UTF-8 text (a.bin, ...), 1 empty (b.txt)``."""
        return "; ".join([self._what(), *self._left_out()])

    def describe_sequences(self) -> str:
        """``6 tokens, 3 sequences, 0 tokens left over``."""
        words = [*([f"{self.tokens:,} tokens"] if self.tokens else ()), f"{self.sequences:,} {self.what}"]
        if self.fill_rate is not None:
            words.append(f"{self.fill_rate:.1%} full")
        if self.truncated:
            words.append(f"{self.truncated:,} documents cut off at data.sequence_length")
        if self.media_cut_off:
            words.append(f"{self.media_cut_off:,} rows left out, whose media end after data.sequence_length")
        if self.learned < self.learned_whole:
            words.append(f"{self.learned:,} of {self.learned_whole:,} learned tokens left")
        if self.left_over:
            words.append(f"{self.left_over:,} tokens left over")
        return ", ".join(words)

    def describe_all(self) -> str:
        """What was read and what became of it: its part of the line for the terminal."""
        held_out = f", {self.validation:,} of them for validation" if self.validation else ""
        drawn = f"; weight {self.weight:g}, {self.epochs:,.1f} epochs" if self.epochs is not None else ""
        return f"{self.describe()}; {self.describe_sequences()}{held_out}{drawn}"

    def to_dict(self) -> dict[str, Any]:
        """The same, as JSON can hold it."""
        mixed = ("weight", "epochs") if self.epochs is None else ()
        counts = {name: value for name, value in vars(self).items() if name not in mixed}
        return {**counts, "description": self.describe_all()}

    def _what(self) -> str:
        if not self.columns:
            return f"{sum(self.files.values()):,} files"
        files = ", ".join(f"{count:,} {name}" for name, count in self.files.items())
        return f"{files}: {self.documents:,} documents, {self.columns}{self._media()}"

    def _media(self) -> str:
        """``; 12 images and 1 video, which are 1,040 of the tokens``."""
        if not self.media:
            return ""
        counted = " and ".join(f"{count:,} {kind}{'' if count == 1 else 's'}" for kind, count in self.media.items())
        return f"; {counted}, which are {self.media_tokens:,} of the tokens"

    def _left_out(self) -> Iterable[str]:
        files = [f"{len(paths)} {reason} ({_some(paths)})" for reason, paths in self.skipped.items()]
        if self.empty_rows:
            files.append(f"{self.empty_rows:,} rows without text")
        if self.bad_media:
            files.append(f"{self.bad_media:,} rows with media that can't be read")
        if self.bad_lines:
            first = self.first_bad_lines[:_SHOWN]
            more = ["..."] if self.bad_lines > len(first) else []
            files.append(f"{self.bad_lines:,} bad lines ({'; '.join([*first, *more])})")
        return [f"left out: {', '.join(files)}"] if files else []


def _shortened(text: str) -> str:
    return repr(text if len(text) <= _LONGEST else f"{text[: _LONGEST - 20]}...{text[-17:]}")


def _some(paths: list[str]) -> str:
    return ", ".join(Path(path).name for path in paths[:_SHOWN]) + (", ..." if len(paths) > _SHOWN else "")
