"""The keys that say how files become documents, for the whole section ``data`` and for each of ``data.sources``."""

from __future__ import annotations

from pathlib import PurePath
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from veomni_trainer.job.section import Number, Section


def _named(files: str | list[str]) -> str | list[str]:
    """Refuse an empty name: as a path it would mean the working directory, with the job in it."""
    if "" in ([files] if isinstance(files, str) else files):
        raise ValueError("a file's name is empty; name a file, a folder or a glob")
    return files


def _relative(pattern: str) -> str:
    if not pattern or PurePath(pattern).is_absolute():
        raise ValueError(
            "must be a glob below the folders of files, such as **/*.txt; a glob of its own goes into files"
        )
    return pattern


Files = Annotated[str | list[str], AfterValidator(_named)]


class Columns(Section):
    """Which columns of a table hold what: ``text``, or ``messages``, or ``prompt`` and ``completion``."""

    text: str | None = None
    """The column with a document's text."""
    messages: str | None = None
    """The column with a chat: a list of turns, each with ``role`` and ``content`` (or ``from`` and ``value``)."""
    tools: str | None = None
    """The column with the tools that a chat may call, as JSON schemas."""
    prompt: str | None = None
    """The column with the text that is given."""
    completion: str | None = None
    """The column with the text that is learned."""

    @model_validator(mode="after")
    def _is_one_kind(self) -> Self:
        if (self.prompt is None) != (self.completion is None):
            raise ValueError("prompt and completion belong together; name both columns")
        kinds = [name for name in ("text", "messages", "prompt") if getattr(self, name) is not None]
        if len(kinds) != 1:
            named = f"names {' and '.join(kinds)}" if kinds else "names none"
            raise ValueError(f"{named}; name text, or messages, or prompt and completion")
        if self.tools is not None and self.messages is None:
            raise ValueError("tools are those of a chat; name messages too")
        return self


class ReadingKeys(Section):
    """How the files of a source are read."""

    pattern: Annotated[str, AfterValidator(_relative)] = "**/*"
    """Which files of a folder are read."""
    format: Literal["text", "jsonl", "json", "csv", "tsv", "parquet", "arrow", "dataset"] | None = None
    """What the files are; by default their suffix says it. ``dataset``: a folder of ``datasets``' ``save_to_disk``."""
    separator: str | None = Field(default=None, min_length=1, max_length=1)
    """The character between two values of a CSV file; by default a comma, and in a TSV file a tab."""
    split: str | None = None
    """The split of a data set that has several: a saved ``DatasetDict``, or one of the Hub."""
    subset: str | None = None
    """The subset (configuration) of a data set of the Hub."""
    revision: str | None = None
    """The branch, tag or commit of a data set of the Hub; by default ``main``."""
    columns: Columns | None = None
    """Which columns of a table are read; by default those with a usual name."""
    loss_on: Literal["assistant", "all"] = "assistant"
    """Of chats and pairs: whether only the assistant's turns (the completion) are learned, or everything."""
    bad_lines: Literal["stop", "skip"] = "stop"
    """Whether a line or row that can't be read ends the job, or is counted and left out."""


class Source(ReadingKeys):
    """One of several sources: the keys that it leaves out are those of the section ``data``."""

    files: Files
    """Files, folders (searched by ``pattern``), globs, ids of data sets of the Hub, or ``python-stdlib``."""
    weight: Number = Field(default=1.0, gt=0.0)
    """How often sequences are drawn from this source, relative to the others."""
