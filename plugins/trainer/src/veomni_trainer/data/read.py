"""The documents of a source: texts, chats, prompts with completions, and tokens, tokenized lazily.

Their order is the same on every machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from veomni_core.commands import shown
from veomni_trainer.data.columns import describe, find_columns
from veomni_trainer.data.documents import Document, Example
from veomni_trainer.data.messages import Message
from veomni_trainer.data.prompts import text_of, value_of
from veomni_trainer.data.reading import BadLine, Reading, Unreadable
from veomni_trainer.data.source_reader import SourceReader
from veomni_trainer.data.tables import Row
from veomni_trainer.data.tokens import Tokenizer
from veomni_trainer.job.source_keys import Columns, Source

_EXAMPLES, _CHARACTERS = 512, 1_000_000  # of a batch that is tokenized at once: whichever is reached first


def read_documents(
    source: Source, tokenizer: Tokenizer, reading: Reading, streaming: bool = False
) -> Iterator[Document]:
    """Yield the tokenized documents of a source; counts in ``reading`` what was read and what was left out.

    A data set of the Hub is downloaded first, unless it is ``streaming``.

    A file that is named itself must exist and be readable. Other files in a folder, or matched by a glob, are left out
    if they are neither text nor a table.

    Raises:
        JobFileError: there is nothing to read, a file is unreadable, or a line is and ``bad_lines`` is ``stop``.
    """
    for batch in _batches(_DocumentReader(source, tokenizer, reading, streaming=streaming).items()):
        encoded = iter(tokenizer.encode([each for each in batch if isinstance(each, Example)]))
        for each in batch:
            document = next(encoded) if isinstance(each, Example) else each
            reading.count_end(tokenizer.end_of(document))
            yield document


def _batches(items: Iterator[Example | Document]) -> Iterator[list[Example | Document]]:
    batch: list[Example | Document] = []
    characters = 0
    for item in items:
        batch.append(item)
        characters += len(item.text if isinstance(item, Example) else item.ids)
        if len(batch) == _EXAMPLES or characters >= _CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


class _DocumentReader(SourceReader[Example | Document]):
    """Makes a document of each row of one source. A file of text is a document too."""

    def _find(self, there: Mapping[str, str], may_have_more: bool) -> Columns:
        return find_columns(there, may_have_more)

    def _describe(self, columns: Columns, there: Mapping[str, str]) -> str:
        if columns.prompt is not None and columns.completion is None:
            raise Unreadable("has prompts, and data.columns names no completion, which this train.method learns")
        if columns.chosen is not None:
            raise Unreadable("has answers of which one is preferred, and this train.method learns completions")
        loss_on, is_written = self._source.loss_on, columns.text is not None or columns.input_ids is not None
        if not is_written and loss_on == "assistant" and not self._tokenizer.has_offsets:
            raise Unreadable(
                "can't be learned in part, since this tokenizer doesn't say which characters a token stands for. Write "
                "data.loss_on: all, or a tokenizer with a tokenizer.json"
            )
        if columns.messages is not None:
            self._prompts.check_template(columns.messages)
        return describe(columns, loss_on, self._prompts.form, there)

    def _item(self, row: Row, columns: Columns, origin: str) -> Example | Document | None:
        if columns.input_ids is not None:
            return _tokens(row, columns, self._source.loss_on, self._tokenizer.vocab_size)
        if columns.text is not None:
            return self._text(text) if (text := text_of(row, columns.text)) else None
        if columns.messages is None:
            return self._pair(row, columns, origin)
        return self._chat(row, columns, self._prompts.chat(row), origin)

    def _show(self, item: Example | Document) -> None:
        if isinstance(item, Document):
            pretrained, ids = self._tokenizer.pretrained, item.ids[:64].tolist()
            item = Example(str(pretrained.decode(ids) if pretrained else ids))
        self._reading.show(item)

    def _text(self, text: str) -> Example:
        return self._checked(Example(text))

    def _checked(self, example: Example) -> Example:
        """The example, whose words hold no token in whose place the model takes media."""
        if self._processor is not None:
            self._processor.check_words(example.text)
        return example

    def _pair(self, row: Row, columns: Columns, origin: str) -> Example | Document:
        """A prompt and what follows it. The end token is learned too, since the completion ends there."""
        loss_on, tools = self._source.loss_on, columns.tools or ""
        prompt, answers = self._prompts.read(row, ("completion",))
        completion = answers["completion"]
        if isinstance(prompt, str) and isinstance(completion, str):
            if row.get(tools):
                raise BadLine(f"column {tools!r} is not empty, and texts have no place for tools")
            self._refuse_beside_text(row, columns)
            text = prompt + completion
            return self._checked(Example(text, None if loss_on == "all" else ((len(prompt), len(text)),)))
        assert not isinstance(prompt, str) and not isinstance(completion, str)
        for message in prompt if loss_on != "all" else ():
            message.excluded = True
        return self._chat(row, columns, [*prompt, *completion], origin)

    def _chat(self, row: Row, columns: Columns, messages: list[Message], origin: str) -> Example | Document:
        """A chat; one with media, or from a table that has columns of them, by the model's processor."""
        if (media := self._media_of(row, columns, messages)) is not None:
            return media.document(row, columns, messages, self._path, origin)
        assert self._chats is not None  # or its template was missed
        return self._checked(self._chats.example(messages, row.get(columns.tools or "")))


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
