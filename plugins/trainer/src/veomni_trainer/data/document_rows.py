"""Rows of tables as documents to learn from: texts, chats, prompts with completions, and tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from veomni_core.commands import shown
from veomni_trainer.data.chat import Chats
from veomni_trainer.data.columns import (
    check_columns,
    check_unread,
    describe,
    find_columns,
    names_of,
    refuse_media,
    unread_that_matter,
    with_media,
)
from veomni_trainer.data.documents import Document, Example
from veomni_trainer.data.media.placing import has_places
from veomni_trainer.data.media.rows import MediaRows
from veomni_trainer.data.media.sources import media_in
from veomni_trainer.data.messages import Message, read_messages
from veomni_trainer.data.prompts import PromptReader, text_of, value_of, with_system
from veomni_trainer.data.reading import BadLine, Reading, Unreadable
from veomni_trainer.data.tables import Row
from veomni_trainer.data.tokens import Tokenizer
from veomni_trainer.job.source_keys import Columns, Source

ReadRow = Callable[[Row, int], Example | Document | None]


class DocumentRows:
    """Makes a document of each row of one source; the columns of its first table are those of all its tables."""

    needs = ""  # a file of text is a document too

    def __init__(self, source: Source, tokenizer: Tokenizer, reading: Reading) -> None:
        self._source, self._tokenizer, self._reading = source, tokenizer, reading
        self.processor = tokenizer.processor
        self._columns: Columns | None = None
        self._read: ReadRow | None = None
        self._media: MediaRows | None = None
        self._is_media = False

    def begin(self, there: Mapping[str, str], has_schema: bool, path: Path) -> list[str]:
        """Prepare for the rows of the table ``path`` with the columns ``there``; returns the names of those to read.

        Raises:
            Unreadable: it can't be said which they are, or this tokenizer can't learn from them.
        """
        written = self._source.columns
        if self._columns is None:
            found = written or find_columns(there, may_have_more=not has_schema)
            if not self._tokenizer.no_media:
                found = with_media(found, there)
            else:
                refuse_media(found, self._tokenizer.no_media)
            self._columns, self._is_media = found, any(name in there for name in found.media.values())
            self._read = self._reader(self._columns)
            self._reading.unused = [name for name in there if name not in names_of(self._columns)]
        self._path, self._unit = path, "row" if has_schema and path.suffix != ".csv" else "line"
        if has_schema:  # tools are left out where a chat has none, unless the job names their column
            check_columns(names_of(written or self._columns.model_copy(update={"tools": None})), there)
        return [*names_of(self._columns), *unread_that_matter(self._columns, there)]

    def read(self, row: Row, number: int) -> Example | Document | None:
        """The document of a row, or ``None`` of a row without text.

        Raises:
            BadLine: the row holds something else.
        """
        if self._read is None or self._columns is None:
            raise BadLine("an object without columns")
        columns = self._columns if self._tokenizer.no_media else with_media(self._columns, row)
        check_unread(row, columns, self._tokenizer.no_media)
        read = self._read(row, number)
        if self.processor is not None and isinstance(read, Example):
            self.processor.check_words(read.text)
        return read

    def show(self, read: Example | Document) -> None:
        """Keep the first row, as the user may see it."""
        if isinstance(read, Document):
            pretrained = self._tokenizer.pretrained
            ids = read.ids[:64].tolist()
            self._reading.show(Example(str(pretrained.decode(ids) if pretrained else ids)))
        else:
            self._reading.show(read)

    def _reader(self, columns: Columns) -> ReadRow:
        loss_on, tokenizer = self._source.loss_on, self._tokenizer
        if columns.prompt is not None and columns.completion is None:
            raise Unreadable("has prompts, and data.columns names no completion, which this train.method learns")
        if columns.chosen is not None:
            raise Unreadable("has answers of which one is preferred, and this train.method learns completions")
        form, no_media = self._source.prompt_format, tokenizer.no_media
        prompts = PromptReader(columns, form, tokenizer.chats is not None, no_media, self._is_media)
        self._reading.columns = describe(columns, loss_on, prompts.form)
        if columns.input_ids is not None:
            return lambda row, number: _tokens(row, columns, loss_on, tokenizer.vocab_size)
        if columns.text is None and loss_on == "assistant" and not tokenizer.has_offsets:
            raise Unreadable(
                "can't be learned in part, since this tokenizer doesn't say which characters a token stands for. Write "
                "data.loss_on: all, or a tokenizer with a tokenizer.json"
            )
        text, messages, tools = columns.text, columns.messages, columns.tools or ""
        if text is not None:
            return lambda row, number: Example(written) if (written := text_of(row, text)) else None
        self._chats = Chats(tokenizer.chats, loss_on, self._reading.not_rendered) if tokenizer.chats else None
        if messages is None:
            return lambda row, number: self._pair(row, number, prompts, tools)
        prompts.check_template(messages)
        system = columns.system or ""

        def turns(row: Row) -> list[Message]:
            read = read_messages(value_of(row, messages), no_media=no_media)
            return with_system(read, text_of(row, system) if row.get(system) else "")

        return lambda row, number: self._chat(row, number, turns(row), tools)

    def _pair(self, row: Row, number: int, prompts: PromptReader, tools: str) -> Example | Document:
        """A prompt and what follows it. The end token is learned too, since the completion ends there."""
        loss_on = self._source.loss_on
        prompt, answers = prompts.read(row, ("completion",))
        completion = answers["completion"]
        if isinstance(prompt, str) and isinstance(completion, str):
            if row.get(tools):
                raise BadLine(f"column {tools!r} is not empty, and texts have no place for tools")
            if beside := [name for name in self._media_of(row).values() if row.get(name)]:
                raise BadLine(f"column {beside[0]!r} is not empty, and texts have no place for it; chats have")
            text = prompt + completion
            return Example(text, None if loss_on == "all" else ((len(prompt), len(text)),))
        assert not isinstance(prompt, str) and not isinstance(completion, str)
        for message in prompt if loss_on != "all" else ():
            message.excluded = True
        return self._chat(row, number, [*prompt, *completion], tools)

    def _chat(self, row: Row, number: int, messages: list[Message], tools: str) -> Example | Document:
        """A chat; one with media, or from a table that has columns of them, by the model's processor."""
        assert self._chats is not None
        columns = self._media_of(row)
        placeholders = self._source.placeholders
        here = any(row.get(name) for name in columns.values()) or self._is_media or has_places(messages, placeholders)
        if self.processor is None or not here:
            return self._chats.example(messages, row.get(tools))
        if self._media is None:
            self._media = MediaRows(self._source, self.processor, self._reading)
        folder, origin = self._path.absolute().parent, f"{self._path}, {self._unit} {number}"
        beside = {
            kind: media_in(row.get(name), kind, folder, self._source.media_urls) for kind, name in columns.items()
        }
        return self._media.document(messages, row.get(tools), beside, folder, origin)

    def _media_of(self, row: Row) -> dict[str, str]:
        """The columns with media, by kind; those of a row without a schema may be others than the first's."""
        assert self._columns is not None
        return with_media(self._columns, row).media


def _tokens(row: Row, columns: Columns, loss_on: str, vocabulary: int) -> Document | None:
    """A document of the row's own tokens, to which nothing is added."""
    assert columns.input_ids is not None
    ids = _integers(row, columns.input_ids, 0, vocabulary - 1)
    if columns.attention_mask is not None:
        real = _integers(row, columns.attention_mask, 0, 1, len(ids)).astype(np.bool_)
    else:
        real = np.ones(len(ids), np.bool_)
    learned = None
    if columns.labels is not None:
        labels = _integers(row, columns.labels, -100, vocabulary - 1, len(ids))
        learned = labels != -100
        if wrong := np.flatnonzero(learned & (labels != ids)).tolist():
            raise BadLine(
                f"column {columns.labels!r} has {labels[wrong[0]]} where the token is {ids[wrong[0]]} (at "
                f"{wrong[0]}); a label is its token, or -100, and is not shifted"
            )
    elif columns.loss_mask is not None:
        learned = _integers(row, columns.loss_mask, 0, 1, len(ids)).astype(np.bool_)
    kept = ids[real].astype(np.uint16 if vocabulary <= 2**16 else np.uint32)
    if not len(kept):
        return None
    return Document(kept, None if learned is None or loss_on == "all" else learned[real])


def _integers(row: Row, name: str, least: int, most: int, length: int | None = None) -> Any:
    values = value_of(row, name)
    if not isinstance(values, list) or not all(isinstance(each, (int, bool)) for each in values):
        raise BadLine(f"column {name!r} must be a list of integers, got {shown(values)}")
    if length is not None and len(values) != length:
        raise BadLine(f"column {name!r} has {len(values)} values for {length} tokens")
    if out := [each for each in values if not least <= each <= most]:
        raise BadLine(f"column {name!r} has {out[0]}, which is not between {least} and {most}")
    return np.asarray(values, np.int64)
