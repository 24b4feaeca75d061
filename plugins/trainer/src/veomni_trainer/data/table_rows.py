"""What the readers of rows have in common: which columns are read, and which media a row has."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from veomni_trainer.data.chat import Chats
from veomni_trainer.data.columns import (
    check_columns,
    check_unread,
    names_of,
    refuse_media,
    unread_that_matter,
    with_media,
)
from veomni_trainer.data.media.placing import has_places
from veomni_trainer.data.media.rows import MediaRows
from veomni_trainer.data.media.sources import Medium, media_in
from veomni_trainer.data.messages import Message
from veomni_trainer.data.prompts import PromptReader
from veomni_trainer.data.reading import BadLine, Reading
from veomni_trainer.data.tables import Row
from veomni_trainer.data.tokens import Tokenizer
from veomni_trainer.job.source_keys import Columns, Source

Item = TypeVar("Item")
Media = Mapping[str, Sequence[Medium]]  # of a row, by kind


class TableRows(ABC, Generic[Item]):
    """Makes an item of each row of one source; the columns of its first table are those of all its tables.

    Args:
        source: the source.
        tokenizer: that of the job.
        reading: counts what was read.
        no_media: why rows may have no images, video and audio; empty if they may.

    Attributes:
        processor: the model's, whose tokens of media no text may hold; ``None`` of a model of text.
    """

    needs = ""
    """The columns that a table must have, for messages; empty where a file of text is an item too."""

    def __init__(self, source: Source, tokenizer: Tokenizer, reading: Reading, no_media: str) -> None:
        self._source, self._reading, self._no_media = source, reading, no_media
        self._written, self.processor = source.columns, tokenizer.processor
        self._chats = Chats(tokenizer.chats, source.loss_on, reading.not_rendered) if tokenizer.chats else None
        self._columns: Columns | None = None
        self._media: MediaRows | None = None

    @abstractmethod
    def _find(self, there: Mapping[str, str], may_have_more: bool) -> Columns:
        """The columns to read where the job names none. Raises Unreadable if it can't be said which they are."""

    @abstractmethod
    def _describe(self, columns: Columns, there: Mapping[str, str]) -> str:
        """What is read, in words. Raises Unreadable if an item can't be made of it."""

    @abstractmethod
    def _item(self, row: Row, number: int, columns: Columns) -> Item | None:
        """As :meth:`read`, of a row that has ``columns``."""

    @abstractmethod
    def show(self, read: Item) -> None:
        """Keep the first item, for the user to see how rows are read."""

    def begin(self, there: Mapping[str, str], has_schema: bool, path: Path) -> list[str]:
        """Prepare for the rows of the table ``path`` with the columns ``there``; returns the names of those to read.

        Raises:
            Unreadable: it can't be said which they are, or nothing can be learned from them.
        """
        if self._columns is None:
            found = self._written or self._find(there, not has_schema)
            if self._no_media:
                refuse_media(found, self._no_media)
            else:
                found = with_media(found, there)
            self._columns, self._is_media = found, any(name in there for name in found.media.values())
            form, has_template = self._source.prompt_format, self._chats is not None
            self._prompts = PromptReader(found, form, has_template, self._no_media, self._is_media)
            self._reading.columns = self._describe(found, there)
            self._reading.unused = [name for name in there if name not in names_of(found)]
        self._path, self._unit = path, "row" if has_schema and path.suffix != ".csv" else "line"
        if has_schema:  # tools are left out where a chat has none, unless the job names their column
            check_columns(names_of(self._written or self._columns.model_copy(update={"tools": None})), there)
        return [*names_of(self._columns), *unread_that_matter(self._columns, there)]

    def read(self, row: Row, number: int) -> Item | None:
        """The item of a row with its number, or ``None`` if it is empty.

        Raises:
            BadLine: the row holds something else.
            Unreadable: nothing can be learned from such rows.
        """
        if self._columns is None:
            raise BadLine("an object without columns")
        columns = self._columns if self._no_media else with_media(self._columns, row)
        check_unread(row, columns, self._no_media)
        return self._item(row, number, columns)

    def _refuse_beside_text(self, row: Row, columns: Columns) -> None:
        if beside := [name for name in columns.media.values() if row.get(name)]:
            raise BadLine(f"column {beside[0]!r} is not empty, and texts have no place for it; chats have")

    def _media_of(self, row: Row, columns: Columns, turns: Sequence[Message]) -> tuple[MediaRows, Media, Path] | None:
        """What reads media, the row's own, and the folder where their paths go from; ``None`` of text alone.

        A chat of text in a table that has columns of media is none of text alone, so that all are rendered alike.
        """
        here = any(row.get(name) for name in columns.media.values()) or self._is_media
        if self._no_media or self.processor is None or not (here or has_places(turns, self._source.placeholders)):
            return None
        self._media = self._media or MediaRows(self._source, self.processor, self._reading)
        folder, urls = self._path.absolute().parent, self._source.media_urls
        return self._media, {k: media_in(row.get(name), k, folder, urls) for k, name in columns.media.items()}, folder
