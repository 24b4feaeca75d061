"""From the files of a source to tokenized documents, lazily, and in an order that is the same on every machine."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from veomni_core.errors import JobFileError
from veomni_trainer.data.chat import Chats
from veomni_trainer.data.columns import (
    ReadRow,
    check_columns,
    check_unread,
    describe,
    find_columns,
    names_of,
    row_reader,
    unread_that_matter,
)
from veomni_trainer.data.documents import Document, Example
from veomni_trainer.data.files import DATASET, HUB, TEXT, FoundFile, find_files, other_kind
from veomni_trainer.data.reading import BadLine, Reading, Unreadable
from veomni_trainer.data.tables import CsvTable, JsonLinesTable, JsonTable, Table
from veomni_trainer.data.text import read_text
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
    for batch in _batches(_SourceReader(source, tokenizer, reading, streaming).examples()):
        for document in tokenizer.encode(batch):
            reading.count_end(tokenizer.end_of(document))
            yield document


def _batches(examples: Iterator[Example]) -> Iterator[list[Example]]:
    batch: list[Example] = []
    characters = 0
    for example in examples:
        batch.append(example)
        characters += len(example.text)
        if len(batch) == _EXAMPLES or characters >= _CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


class _SourceReader:
    """Reads one source; the columns of its first table are those of all its tables."""

    def __init__(self, source: Source, tokenizer: Tokenizer, reading: Reading, streaming: bool) -> None:
        self._source, self._tokenizer, self._reading, self._streaming = source, tokenizer, reading, streaming
        self._columns: Columns | None = None

    def examples(self) -> Iterator[Example]:
        files = find_files(self._source, self._reading)
        self._check_one_kind(files)
        for entry, found in groupby(files, lambda file: file.entry):
            before = self._reading.documents
            for file in found:
                if file.format is not None:
                    self._check_keys(file)
                yield from self._file(file)
            if self._reading.documents == before:
                raise JobFileError(f"{self._reading.key}: {entry} holds no text: {self._reading.describe()}")

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
        source, path = self._source, file.path
        hub_alone = [key for key in ("subset", "revision") if getattr(source, key) and file.format != HUB]
        if source.split is not None and file.format not in (DATASET, HUB):
            raise JobFileError(
                f"{self._reading.key}: {path} is {file.format}, and data.split is for folders of save_to_disk and data "
                "sets of the Hub. Remove it, and choose files by data.pattern"
            )
        if hub_alone:
            raise JobFileError(
                f"{self._reading.key}: {path} is no data set of the Hub, which data.{hub_alone[0]} is for. Remove it"
            )
        if source.separator is not None and file.format not in ("csv", "tsv"):
            raise JobFileError(
                f"{self._reading.key}: {path} is {file.format}, and data.separator is for CSV. Remove it"
            )
        if source.columns is not None and file.format == TEXT:
            raise JobFileError(
                f"{self._reading.key}: {path} is text, and data.columns is for tables. Remove it, or write data.format"
            )

    def _file(self, file: FoundFile) -> Iterator[Example]:
        if file.format is None:
            what = f"is {other_kind(file.path)}: neither text nor a table. If it is one, write data.format"
            self._leave_out(file, what)
        elif file.path.is_file() and not file.path.stat().st_size:
            self._leave_out(file, "is empty")
        elif file.format == TEXT:
            try:
                text = read_text(file.path)
            except Unreadable as problem:
                self._leave_out(file, str(problem))
            else:
                yield self._counted(Example(text))
                self._reading.read_file(TEXT)
        else:
            try:
                yield from self._table(file, file.format)
            except Unreadable as problem:
                raise JobFileError(f"{self._reading.key}: {file.path} {problem}") from None

    def _table(self, file: FoundFile, file_format: str) -> Iterator[Example]:
        table = open_table(file.path, file_format, self._source, self._streaming)
        there = table.columns()
        read_row = self._row_reader(there, table.has_schema) if there else None
        columns = self._columns
        wanted = [*names_of(columns), *unread_that_matter(columns, there)] if columns else []
        number = 0
        for number, row in table.rows(wanted):
            try:
                if isinstance(row, BadLine):
                    raise row
                if read_row is None or columns is None:
                    raise BadLine("an object without columns")
                check_unread(row, columns)
                example = read_row(row)
            except BadLine as problem:
                self._bad_line(f"{file.path}, {table.unit} {number}: {problem}")
            except Unreadable as problem:
                raise JobFileError(f"{self._reading.key}: {file.path}, {table.unit} {number}: {problem}") from None
            else:
                if example is None:
                    self._reading.empty_rows += 1
                else:
                    self._reading.show(example)
                    yield self._counted(example)
        if number:
            self._reading.read_file(file_format)
        else:
            self._leave_out(file, "is without rows")

    def _row_reader(self, there: dict[str, str], has_schema: bool) -> ReadRow:
        """How a row of a table with the columns ``there`` becomes an example. Without a schema, rows may differ."""
        loss_on, written = self._source.loss_on, self._source.columns
        if self._columns is None:
            self._columns = written or find_columns(there, may_have_more=not has_schema)
            self._reading.columns = describe(self._columns, loss_on)
            self._reading.unused = [name for name in there if name not in names_of(self._columns)]
        if has_schema:  # tools are left out where a chat has none, unless the job names their column
            needed = names_of(written or self._columns.model_copy(update={"tools": None}))
            check_columns(needed, there)
        if self._columns.text is None and loss_on == "assistant" and not self._tokenizer.has_offsets:
            raise Unreadable(
                "can't be learned in part, since this tokenizer doesn't say which characters a token stands for. Write "
                "data.loss_on: all, or a tokenizer with a tokenizer.json"
            )
        if self._columns.messages is None:
            return row_reader(self._columns, loss_on, None)
        if self._tokenizer.chats is None:
            raise Unreadable(
                f"holds chats (in column {self._columns.messages!r}), and the tokenizer has no chat template. Write "
                "data.chat_template, or a data.tokenizer that has one"
            )
        return row_reader(self._columns, loss_on, Chats(self._tokenizer.chats, loss_on, self._reading.not_rendered))

    def _counted(self, example: Example) -> Example:
        self._reading.documents += 1
        return example

    def _bad_line(self, problem: str) -> None:
        if self._source.bad_lines == "stop":
            stop = "" if problem.endswith((".", "?")) else "."
            what_to_do = "Correct it, or write data.bad_lines: skip to leave such lines out"
            raise JobFileError(f"{self._reading.key}: {problem}{stop} {what_to_do}")
        self._reading.skip_line(problem)

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
