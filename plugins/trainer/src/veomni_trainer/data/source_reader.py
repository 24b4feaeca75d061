"""Makes items of the rows of one source: which of its files and columns are read, and which media a row has."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Generic, TypeVar

from veomni_core.errors import JobFileError
from veomni_trainer.data.chat import Chats
from veomni_trainer.data.columns import check_columns, check_unread, names_of, unread_that_matter, with_media
from veomni_trainer.data.files import DATASET, HUB, TEXT, FoundFile, find_files, other_kind
from veomni_trainer.data.media.rows import MediaRows
from veomni_trainer.data.messages import Message
from veomni_trainer.data.prompts import PromptReader
from veomni_trainer.data.reading import BadLine, BadMedia, Reading, Unreadable
from veomni_trainer.data.tables import CsvTable, JsonLinesTable, JsonTable, Row, Table
from veomni_trainer.data.text import read_text
from veomni_trainer.data.tokens import Tokenizer
from veomni_trainer.job.source_keys import Columns, Source

Item = TypeVar("Item")
_KEYS = (  # for which formats (or, of columns, for which not), what that is called, and what else to do
    ("split", (DATASET, HUB), "folders of save_to_disk and data sets of the Hub", ", and choose files by data.pattern"),
    ("subset", (HUB,), "those", ""),
    ("revision", (HUB,), "those", ""),
    ("separator", ("csv", "tsv"), "CSV", ""),
    ("columns", (TEXT,), "tables", ", or write data.format"),
)


class SourceReader(ABC, Generic[Item]):
    """Makes an item of each row of one source; the columns of its first table are those of all its tables.

    Args:
        source: the source.
        tokenizer: that of the job.
        reading: counts what was read.
        no_media: why rows may have no images, video and audio; empty if they may. By default the tokenizer says it.
        streaming: whether a data set of the Hub is read from there, and not downloaded first.
    """

    _needs = ""
    """The columns that a table must have, for messages; empty where a file of text is an item too."""

    def __init__(
        self,
        source: Source,
        tokenizer: Tokenizer,
        reading: Reading,
        no_media: str | None = None,
        streaming: bool = False,
    ) -> None:
        self._source, self._tokenizer, self._reading, self._streaming = source, tokenizer, reading, streaming
        self._written, self._processor = source.columns, tokenizer.processor
        self._no_media = tokenizer.no_media if no_media is None else no_media
        self._chats = Chats(tokenizer.chats, source.loss_on, reading.not_rendered) if tokenizer.chats else None
        self._columns: Columns | None = None
        self._media: MediaRows | None = None
        if self._processor is not None and not self._no_media:
            self._media = MediaRows(source, self._processor, reading)

    @abstractmethod
    def _find(self, there: Mapping[str, str], may_have_more: bool) -> Columns:
        """The columns to read where the job names none. Raises Unreadable if it can't be said which they are."""

    @abstractmethod
    def _describe(self, columns: Columns, there: Mapping[str, str]) -> str:
        """What is read, in words. Raises Unreadable if an item can't be made of it."""

    @abstractmethod
    def _item(self, row: Row, columns: Columns, origin: str) -> Item | None:
        """The item of a row that has ``columns``, or ``None`` if it is empty; ``origin`` is its file and number.

        Raises:
            BadLine: the row holds something else.
            Unreadable: nothing can be learned from such rows.
        """

    @abstractmethod
    def _show(self, item: Item) -> None:
        """Keep the first item, for the user to see how rows are read."""

    def _text(self, text: str) -> Item:
        """The item of a file of text, where that is one. Raises BadMedia if it holds a token of media."""
        raise NotImplementedError

    def items(self) -> Iterator[Item]:
        """The items; a file that is named itself must exist and be readable, and others are left out.

        Raises:
            JobFileError: there is nothing to read, a file is unreadable, or a line is and ``bad_lines`` is ``stop``.
        """
        files = find_files(self._source, self._reading)
        if not self._needs:
            self._check_one_kind(files)
        for entry, found in groupby(files, lambda file: file.entry):
            before = self._reading.documents
            for file in found:
                yield from self._found(file)
            if self._reading.documents == before:
                what = "rows" if self._needs else "text"
                raise JobFileError(f"{self._reading.key}: {entry} holds no {what}: {self._reading.describe()}")

    def _check_one_kind(self, files: list[FoundFile]) -> None:
        """Refuse tables among text files: whether a table's syntax should be learned is the user's to say."""
        tables = [file for file in files if file.format not in (TEXT, None)]
        for file in files if tables else ():
            if file.format == TEXT and _is_text(file.path):
                raise JobFileError(
                    f"{self._reading.key}: {tables[0].path} is {tables[0].format}, and {file.path} is text. Narrow "
                    "data.pattern, put them into two of data.sources, or write data.format: text to train on every "
                    "file as it is"
                )

    def _found(self, file: FoundFile) -> Iterator[Item]:
        """The items of a file; of a data set of the Hub, those of its files where they are read as others are."""
        if file.format != HUB:
            self._check_keys(file, file.format)
            yield from self._file(file)
            return

        from veomni_trainer.data import dataset_tables

        table = dataset_tables.HubTable(str(file.path), self._source, self._streaming)
        try:
            parts = table.files()
            self._check_keys(file, HUB, *{part.format for part in parts})
            for part in parts:
                yield from self._file(part)
            if not parts:
                yield from self._table(file, table)
        except Unreadable as problem:
            raise JobFileError(f"{self._reading.key}: {file.path} {problem}") from None

    def _check_keys(self, file: FoundFile, *kinds: str | None) -> None:
        """Refuse keys that say nothing of a file of this format, or of these."""
        for key, formats, purpose, instead in _KEYS:
            if getattr(self._source, key) is None or None in kinds:
                continue
            if any(kind in formats for kind in kinds) == (key == "columns"):
                is_ = "no data set of the Hub" if formats == (HUB,) else file.format
                raise JobFileError(
                    f"{self._reading.key}: {file.path} is {is_}, and data.{key} is for {purpose}. Remove it{instead}"
                )

    def _file(self, file: FoundFile) -> Iterator[Item]:
        if file.format is None:
            what = f"is {other_kind(file.path)}: neither text nor a table. If it is one, write data.format"
            self._leave_out(file, what)
        elif file.path.is_file() and not file.path.stat().st_size:
            self._leave_out(file, "is empty")
        elif file.format == TEXT and self._needs:
            self._leave_out(file, f"is text, and this train.method needs a table of {self._needs}")
        elif file.format == TEXT:
            try:
                item = self._text(read_text(file.path))
            except (Unreadable, BadMedia) as problem:
                self._leave_out(file, str(problem))
            else:
                self._reading.documents += 1
                yield item
                self._reading.files[TEXT] += 1
        else:
            try:
                separator = self._source.separator or file.separator
                yield from self._table(file, open_table(file.path, file.format, self._source, separator))
            except Unreadable as problem:
                raise JobFileError(f"{self._reading.key}: {file.path} {problem}") from None

    def _table(self, file: FoundFile, table: Table) -> Iterator[Item]:
        self._path, there = file.path, table.columns()
        wanted = self._begin(there, table.has_schema) if there else ()
        number = 0
        for number, row in table.rows(wanted):
            origin = f"{file.path}, {table.unit} {number}"
            try:
                if isinstance(row, BadLine):
                    raise row
                item = self._read(row, origin)
            except BadLine as problem:
                self._bad_line(f"{origin}: {problem}", isinstance(problem, BadMedia))
            except Unreadable as problem:
                raise JobFileError(f"{self._reading.key}: {origin}: {problem}") from None
            else:
                if item is None:
                    self._reading.empty_rows += 1
                else:
                    if not self._reading.sample:
                        self._show(item)
                    self._reading.documents += 1
                    yield item
        if number:
            self._reading.files[str(file.format)] += 1
        else:
            self._leave_out(file, "is without rows")

    def _bad_line(self, problem: str, is_media: bool) -> None:
        key, such = ("media_errors", "rows") if is_media else ("bad_lines", "lines")
        if getattr(self._source, key) == "stop":
            stop = "" if problem.endswith((".", "?")) else "."
            what_to_do = f"Correct it, or write data.{key}: skip to leave such {such} out"
            raise JobFileError(f"{self._reading.key}: {problem}{stop} {what_to_do}")
        self._reading.skip_line(problem, is_media)

    def _leave_out(self, file: FoundFile, reason: str) -> None:
        """Leave out a file without text, unless the job names it itself."""
        if file.named:
            raise JobFileError(f"{self._reading.key}: {file.path} {reason}")
        self._reading.skip_file(file.path, reason)

    def _begin(self, there: Mapping[str, str], has_schema: bool) -> list[str]:
        """Prepare for the rows of a table with the columns ``there``; returns the names of those to read.

        Raises:
            Unreadable: it can't be said which they are, or nothing can be learned from them.
        """
        if self._columns is None:
            found = self._written or self._find(there, not has_schema)
            if self._no_media:
                for name in found.media.values():
                    raise Unreadable(f"has {name!r}, and {self._no_media}")
            else:
                found = with_media(found, there)
            self._columns, self._is_media = found, any(name in there for name in found.media.values())
            form, has_template = self._source.prompt_format, self._chats is not None
            self._prompts = PromptReader(found, form, has_template, self._no_media, self._is_media)
            self._reading.columns = self._describe(found, there)
            self._reading.unused = [name for name in there if name not in names_of(found)]
        if has_schema:  # tools are left out where a chat has none, unless the job names their column
            check_columns(names_of(self._written or self._columns.model_copy(update={"tools": None})), there)
        return [*names_of(self._columns), *unread_that_matter(self._columns, there)]

    def _read(self, row: Row, origin: str) -> Item | None:
        if self._columns is None:
            raise BadLine("an object without columns")
        columns = self._columns if self._no_media else with_media(self._columns, row)
        check_unread(row, columns, self._no_media)
        return self._item(row, columns, origin)

    def _refuse_beside_text(self, row: Row, columns: Columns) -> None:
        if beside := [name for name in columns.media.values() if row.get(name)]:
            raise BadLine(f"column {beside[0]!r} is not empty, and texts have no place for it; chats have")

    def _media_of(self, row: Row, columns: Columns, turns: Sequence[Message]) -> MediaRows | None:
        """What reads the row's media; ``None`` of text alone.

        A chat of text in a table that has columns of media is none of text alone, so that all are rendered alike.
        """
        here = any(row.get(name) for name in columns.media.values()) or self._is_media
        is_media = self._media is not None and (here or self._media.placing.has_places(turns))
        return self._media if is_media else None


def open_table(path: Path, file_format: str, source: Source, separator: str | None = None) -> Table:
    """The table in a file of that format, or in a saved data set. ``datasets`` is imported only for what it reads."""
    if file_format == "jsonl":
        return JsonLinesTable(path)
    if file_format == "json":
        return JsonTable(path)
    if file_format in ("csv", "tsv"):
        usual = "," if file_format == "csv" else "\t"
        return CsvTable(path, separator or usual, is_written=separator is not None)

    from veomni_trainer.data import dataset_tables

    return dataset_tables.open_table(path, file_format, source)


def _is_text(path: Path) -> bool:
    try:
        read_text(path)
    except Unreadable:
        return False
    return True
