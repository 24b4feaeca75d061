"""The section ``data``: the training text, and how it becomes sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from pydantic import Field, field_serializer, model_validator

from veomni_trainer.job.section import Number, Section
from veomni_trainer.job.source_keys import Files, ReadingKeys, Source

STDLIB = "python-stdlib"  # in data.files: the sources of Python's standard library instead of a path
BYTES = "bytes"  # in data.tokenizer: a token per byte instead of a path


class SequenceKeys(Section):
    """How documents become sequences."""

    sequence_length: int = Field(ge=2)
    """Tokens per sequence, at most."""
    packing: bool = False
    """Whether several documents share a sequence without seeing each other.

    Otherwise text is joined, and a document of which only a part is learned has a sequence of its own.
    """
    streaming: bool = False
    """Whether documents are tokenized while the model trains, and never stored."""
    shuffle_buffer: int | None = Field(default=None, ge=1)
    """Of a stream: among how many sequences each next one is drawn (1024)."""
    cache: bool | str = True
    """The folder for tokens, by default in the user's cache folder; ``false``: tokenize at each start."""


class PixelBudget(Section):
    """Between how many pixels an image has after the model's processor has resized it."""

    min: int | None = Field(default=None, ge=1)
    """At least so many; by default as many as the processor's own settings say."""
    max: int | None = Field(default=None, ge=1)
    """At most so many."""

    @model_validator(mode="after")
    def _is_a_range(self) -> Self:
        if self.min is None and self.max is None:
            raise ValueError("names neither min nor max; write one of them, or leave image_pixels out")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min {self.min} is above max {self.max}")
        return self


class DataSection(ReadingKeys, SequenceKeys):
    """The training text, and how it is tokenized and split."""

    files: Files | None = None
    """Files, folders (searched by ``pattern``), globs, ids of data sets of the Hub, or ``python-stdlib``."""
    sources: list[Source] | None = None
    """In place of ``files``: several sources, each with its files and its own keys for reading them."""
    validation_files: Files | None = None
    """Documents to validate on, named as ``files`` are; in place of ``validation_fraction``."""
    validation_split: str | None = None
    """The split of ``files`` to validate on; in place of ``validation_files``."""
    tokenizer: str | None = None
    """A tokenizer's folder or ``tokenizer.json``, a Hub id (``owner/name@revision``), or ``bytes`` (a token per byte).

    By default the tokenizer beside ``model.weights``; without weights, ``bytes``.
    """
    chat_template: str | None = None
    """The path of a Jinja file with the chat template, in place of the tokenizer's own."""
    end_of_document: str | None = None
    """The tokenizer's token that ends a document; by default a token with a usual name."""
    image_pixels: PixelBudget | None = None
    """Between how many pixels the model's processor resizes an image to, ``{min, max}``; by default as it is set up."""
    workers: int | None = Field(default=None, ge=0)
    """Processes that make batches ahead of the steps; by default 2 for media on an accelerator, and otherwise 0."""
    validation_fraction: Number = Field(default=0.0, ge=0.0, le=0.5)
    """The part of the sequences that is held out for validation."""

    @property
    def training_sources(self) -> dict[str, Source]:
        """What is trained on, by the key of the job that names its files, for messages."""
        if self.sources is not None:
            return {f"data.sources.{number}.files": self._filled(each) for number, each in enumerate(self.sources)}
        assert self.files is not None  # one of the two is there, or the section is refused
        return {"data.files": self._source(self.files)}

    @property
    def validation_source(self) -> dict[str, Source]:
        """What is validated on beside ``validation_fraction``, by the key that names it."""
        if self.validation_split is not None:
            assert self.files is not None  # or the section is refused
            source = self._source(self.files).model_copy(update={"split": self.validation_split})
            return {"data.validation_split": source}
        return {} if self.validation_files is None else {"data.validation_files": self._source(self.validation_files)}

    @property
    def validates(self) -> bool:
        """Whether there is anything to validate on."""
        return bool(self.validation_fraction or self.validation_source)

    def renamed(self, rename: Callable[[str, str, str | None], str]) -> DataSection:
        """The section with other names of its files and its tokenizer.

        ``rename`` is given the key of the job, the name, and of files the revision of their source.
        """

        def each(key: str, files: Any, revision: str | None) -> Any:
            if isinstance(files, list):
                return [rename(key, name, revision) for name in files]
            return None if files is None else rename(key, files, revision)

        changes = {key: each(f"data.{key}", getattr(self, key), self.revision) for key in ("files", "validation_files")}
        changes["tokenizer"] = each("data.tokenizer", self.tokenizer, None)
        if self.sources is not None:
            changes["sources"] = [
                source.model_copy(
                    update={"files": each(f"data.sources.{n}.files", source.files, source.revision or self.revision)}
                )
                for n, source in enumerate(self.sources)
            ]
        return self.model_copy(update=changes)

    def _source(self, files: str | list[str]) -> Source:
        return self._filled(Source(files=files))

    def _filled(self, source: Source) -> Source:
        """The source, with the section's keys where it has none of its own."""
        left_out = ReadingKeys.model_fields.keys() - source.model_fields_set
        return source.model_copy(update={name: getattr(self, name) for name in left_out})

    @field_serializer("sources")
    def _as_written(self, sources: list[Source] | None) -> list[dict[str, Any]] | None:
        """Without defaults: a key in a source would count as its own when the dumped job is read."""
        return None if sources is None else [source.model_dump(exclude_unset=True) for source in sources]

    @model_validator(mode="after")
    def _says_it_once(self) -> Self:
        if (self.files is None) == (self.sources is None):
            given = "both are given; remove one of the two" if self.files is not None else "both are missing"
            raise ValueError(f"needs files, or sources (a list, each with its own files): {given}")
        if self.sources == []:
            raise ValueError("sources is an empty list; name at least one source, with its files")
        ways = ("validation_files", "validation_split", "validation_fraction")
        if len(set_ := [way for way in ways if getattr(self, way)]) > 1:
            raise ValueError(f"{' and '.join(set_)} both say what to validate on; remove one of the two")
        if self.validation_split and (self.files is None or self.validation_split == self.split):
            raise ValueError("validation_split is another split of data.files than data.split; name validation_files")
        if self.streaming and self.validation_fraction:
            raise ValueError(
                "streaming: nobody knows how long a stream is, so validation_fraction can't be held out of it; name "
                "validation_files"
            )
        if self.workers and self.streaming:
            raise ValueError("workers: a stream is read by the training process alone; remove workers, or write 0")
        if self.shuffle_buffer is not None and not self.streaming:
            raise ValueError("shuffle_buffer is that of a stream; remove it, or write streaming: true")
        return self
