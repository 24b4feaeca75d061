"""From the files of a source to what is learned of them, lazily, and in an order that is the same on every machine."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from veomni_core.errors import JobFileError
from veomni_trainer.data.document_rows import DocumentRows
from veomni_trainer.data.documents import Document, Example
from veomni_trainer.data.files import DATASET, HUB, TEXT, FoundFile, find_files, other_kind
from veomni_trainer.data.reading import BadLine, BadMedia, Reading, Unreadable
from veomni_trainer.data.table_rows import Item, TableRows
from veomni_trainer.data.tables import CsvTable, JsonLinesTable, JsonTable, Table
from veomni_trainer.data.text import read_text
from veomni_trainer.data.tokens import Tokenizer
from veomni_trainer.job.source_keys import Source

_EXAMPLES, _CHARACTERS = 512, 1_000_000  # of a batch that is tokenized at once: whichever is reached first
_KEYS = (  # for which formats (or, of columns, for which not), what that is called, and what else to do
    ("split", (DATASET, HUB), "folders of save_to_disk and data sets of the Hub", ", and choose files by data.pattern"),
    ("subset", (HUB,), "those", ""),
    ("revision", (HUB,), "those", ""),
    ("separator", ("csv", "tsv"), "CSV", ""),
    ("columns", (TEXT,), "tables", ", or write data.format"),
)


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
    rows = DocumentRows(source, tokenizer, reading)
    for batch in _batches(read_source(source, reading, rows, streaming)):
        encoded = iter(tokenizer.encode([each for each in batch if isinstance(each, Example)]))
        for each in batch:
            document = next(encoded) if isinstance(each, Example) else each
            reading.count_end(tokenizer.end_of(document))
            yield document


def read_source(source: Source, reading: Reading, rows: TableRows[Item], streaming: bool = False) -> Iterator[Item]:
    """What ``rows`` makes of the rows of a source, and of its files of text where it takes them.

    Raises:
        JobFileError: as :func:`read_documents`.
    """
    return _SourceReader(source, reading, rows, streaming).items()


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


class _SourceReader:
    """Reads one source."""

    def __init__(self, source: Source, reading: Reading, rows: TableRows[Any], streaming: bool) -> None:
        self._source, self._reading, self._rows, self._streaming = source, reading, rows, streaming

    def items(self) -> Iterator[Any]:
        files = find_files(self._source, self._reading)
        if not self._rows.needs:
            self._check_one_kind(files)
        for entry, found in groupby(files, lambda file: file.entry):
            before = self._reading.documents
            for file in found:
                if file.format is not None:
                    self._check_keys(file)
                yield from self._file(file)
            if self._reading.documents == before:
                what = "rows" if self._rows.needs else "text"
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

    def _check_keys(self, file: FoundFile) -> None:
        """Refuse keys that say nothing of a file of this format."""
        for key, formats, purpose, instead in _KEYS:
            if getattr(self._source, key) is not None and (file.format in formats) == (key == "columns"):
                is_ = "no data set of the Hub" if formats == (HUB,) else file.format
                raise JobFileError(
                    f"{self._reading.key}: {file.path} is {is_}, and data.{key} is for {purpose}. Remove it{instead}"
                )

    def _file(self, file: FoundFile) -> Iterator[Any]:
        if file.format is None:
            what = f"is {other_kind(file.path)}: neither text nor a table. If it is one, write data.format"
            self._leave_out(file, what)
        elif file.path.is_file() and not file.path.stat().st_size:
            self._leave_out(file, "is empty")
        elif file.format == TEXT and self._rows.needs:
            self._leave_out(file, f"is text, and this train.method needs a table of {self._rows.needs}")
        elif file.format == TEXT:
            try:
                text = read_text(file.path)
                if self._rows.processor is not None:
                    self._rows.processor.check_words(text)
            except (Unreadable, BadMedia) as problem:
                self._leave_out(file, str(problem))
            else:
                yield self._counted(Example(text))
                self._reading.read_file(TEXT)
        else:
            try:
                yield from self._table(file, file.format)
            except Unreadable as problem:
                raise JobFileError(f"{self._reading.key}: {file.path} {problem}") from None

    def _table(self, file: FoundFile, file_format: str) -> Iterator[Any]:
        table = open_table(file.path, file_format, self._source, self._streaming)
        there = table.columns()
        wanted = self._rows.begin(there, table.has_schema, file.path) if there else ()
        number = 0
        for number, row in table.rows(wanted):
            try:
                if isinstance(row, BadLine):
                    raise row
                item = self._rows.read(row, number)
            except BadLine as problem:
                self._bad_line(f"{file.path}, {table.unit} {number}: {problem}", isinstance(problem, BadMedia))
            except Unreadable as problem:
                raise JobFileError(f"{self._reading.key}: {file.path}, {table.unit} {number}: {problem}") from None
            else:
                if item is None:
                    self._reading.empty_rows += 1
                else:
                    if not self._reading.sample:
                        self._rows.show(item)
                    yield self._counted(item)
        if number:
            self._reading.read_file(file_format)
        else:
            self._leave_out(file, "is without rows")

    def _counted(self, item: Item) -> Item:
        self._reading.documents += 1
        return item

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


def open_table(path: Path, file_format: str, source: Source, streaming: bool = False) -> Table:
    """The table in a file of that format, or in a data set. ``datasets`` is imported only for what it reads."""
    if file_format == "jsonl":
        return JsonLinesTable(path)
    if file_format == "json":
        return JsonTable(path)
    if file_format in ("csv", "tsv"):
        usual = "," if file_format == "csv" else "\t"
        return CsvTable(path, source.separator or usual, is_written=source.separator is not None)

    from veomni_trainer.data import dataset_tables

    return dataset_tables.open_table(path, file_format, source, streaming)


def _is_text(path: Path) -> bool:
    try:
        read_text(path)
    except Unreadable:
        return False
    return True
