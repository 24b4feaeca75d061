"""The section ``data``: the training text, and how it becomes sequences."""

from __future__ import annotations

from pydantic import Field

from veomni_trainer.job.section import Number, Section

STDLIB = "python-stdlib"  # in data.files: the sources of Python's standard library instead of a path
BYTES = "bytes"  # in data.tokenizer: a token per byte instead of a path


class DataSection(Section):
    """The training text, and how it is tokenized and split."""

    files: str | list[str]
    """Files, folders (searched by ``pattern``), globs, or ``python-stdlib``."""
    pattern: str = "**/*"
    """Which files of a folder are read."""
    tokenizer: str = BYTES
    """``bytes`` (a token per byte), or the path of a ``tokenizer.json`` or of its folder."""
    end_of_document: str | None = None
    """The tokenizer's token that ends a document; by default a token with a usual name."""
    sequence_length: int = Field(ge=2)
    """Tokens per sequence."""
    validation_fraction: Number = Field(default=0.0, ge=0.0, le=0.5)
    """The part of the sequences that is held out for validation."""
