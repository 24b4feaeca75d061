"""Rows of tables for TRL's trainers: pairs of preferences, and prompts whose completions are judged."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from datasets import Dataset, Features, Json
from pyarrow import ArrowInvalid, ArrowTypeError
from transformers import PreTrainedTokenizerBase

from veomni_core.commands import shown
from veomni_core.errors import JobFileError
from veomni_trainer.data.columns import check_unread, unread_that_matter
from veomni_trainer.data.corpus import Corpus, ReadSource
from veomni_trainer.data.documents import Example
from veomni_trainer.data.files import TEXT, FoundFile, find_files
from veomni_trainer.data.messages import check_characters, read_messages, read_tools
from veomni_trainer.data.read import open_table
from veomni_trainer.data.reading import BadLine, Reading, Unreadable
from veomni_trainer.data.sequences import Counts
from veomni_trainer.data.tables import Row
from veomni_trainer.data.tokens import Tokenizer
from veomni_trainer.job.source_keys import Columns, Source
from veomni_trainer.job.train_section import TrainSection

PAIRS, PROMPTS, TOOLS = ("prompt", "chosen", "rejected"), ("prompt",), "tools"
_KEY = "data.files"


@dataclass(frozen=True)
class RowCounts(Counts):
    """How many rows were read, of what, and how often a training's epoch takes each."""

    what: str = "rows"

    def describe(self) -> str:
        return f"{self.sequences:,} {self.what}"


def read_rows(source: Source, tokenizer: Tokenizer, train: TrainSection) -> Corpus:
    """The rows of a source for ``train.method``: ``prompt``, ``chosen`` and ``rejected``; or ``prompt``.

    Each is text, or a list of chat messages. Other columns of prompts are kept, for the reward.

    Raises:
        JobFileError: there is nothing to read, a column is missing, a line is broken and ``bad_lines`` is ``stop``, or
            chats have no template.
    """
    reader = _RowReader(source, tokenizer, PAIRS if train.method == "dpo" else PROMPTS)
    rows = list(reader.rows())
    if not rows:
        raise JobFileError(f"{_KEY}: {source.files} holds no rows: {reader.reading.describe()}")
    names = dict.fromkeys(name for row in rows for name in row)
    try:
        dataset = _dataset({name: [row.get(name) for row in rows] for name in names})
    except (ArrowInvalid, ArrowTypeError) as error:
        raise JobFileError(
            f"{_KEY}: the rows of {source.files} don't fit into one table, since a column holds values of several "
            f"kinds: {error}"
        ) from None
    repeated = train.grpo.num_generations if train.grpo else 1
    counts = RowCounts(0, len(rows), what="prompts" if train.grpo else "preference pairs")
    read = ReadSource(_KEY, reader.reading, counts, source.weight, len(rows) * repeated, 0)
    return Corpus(dataset, {}, (read,), tokenizer.end)


def _dataset(columns: dict[str, list[Any]]) -> Any:
    """The columns as ``datasets`` holds them: what is nested as JSON. Arrow would give each mapping the keys of all."""
    nested = {name for name, values in columns.items() if any(isinstance(each, (dict, list)) for each in values)}
    plain: Any = Dataset.from_dict({name: values for name, values in columns.items() if name not in nested})
    features = Features({name: Json() if name in nested else plain.features[name] for name in columns})
    return Dataset.from_dict(columns, features=features)


def check_lengths(corpus: Corpus, tokenizer: PreTrainedTokenizerBase, train: TrainSection, longest: int) -> None:
    """Raise JobFileError if a prompt leaves no room in ``longest`` tokens for what follows it."""
    reserved = train.grpo.max_completion_length if train.grpo else 1
    beside = "beside train.grpo.max_completion_length" if train.grpo else "beside the first token of an answer"
    room, rows = longest - reserved, cast("Iterable[dict[str, Any]]", corpus.training)
    for number, row in enumerate(rows, start=1):
        ids = prompt_ids(row, tokenizer)
        if len(ids) > room:
            raise JobFileError(
                f"{_KEY}: prompt {number} has {len(ids):,} tokens, and data.sequence_length leaves {room:,} {beside}; "
                "raise data.sequence_length, or leave the prompt out"
            )


def prompt_ids(row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens of a row's prompt."""
    prompt, tools = row["prompt"], row.get(TOOLS)
    if isinstance(prompt, str):
        return list(tokenizer(prompt)["input_ids"])  # type: ignore[arg-type]
    encoded: Any = tokenizer.apply_chat_template(prompt, tools=tools, add_generation_prompt=True, return_dict=True)
    return list(encoded["input_ids"])


class _RowReader:
    """Reads the tables of one source; ``reading`` counts what was read and what was left out."""

    def __init__(self, source: Source, tokenizer: Tokenizer, columns: tuple[str, ...]) -> None:
        self._source, self._tokenizer, self._columns = source, tokenizer, columns
        self.reading = Reading(_KEY)

    def rows(self) -> Iterator[dict[str, Any]]:
        self.reading.columns = f"columns {', '.join(map(repr, self._columns))}"
        for file in find_files(self._source, self.reading):
            if file.format in (None, TEXT):
                self._leave_out(file)
                continue
            assert file.format is not None
            try:
                yield from self._table(file, file.format)
            except Unreadable as problem:
                raise JobFileError(f"{_KEY}: {file.path} {problem}") from None

    def _table(self, file: FoundFile, file_format: str) -> Iterator[dict[str, Any]]:
        table = open_table(file.path, file_format, self._source)
        there = table.columns()
        if missing := [name for name in self._columns if name not in there]:
            raise Unreadable(
                f"has no column {' and no '.join(map(repr, missing))}; its columns are {', '.join(there) or 'none'}"
            )
        # Other columns of prompts are for the reward. Any column may say what is not trained on, as images are not.
        used = (*PAIRS, TOOLS, *unread_that_matter(Columns(text="prompt"), there))
        names = tuple(name for name in there if self._columns == PROMPTS or name in used)
        if self._columns == PAIRS and not self.reading.unused:
            self.reading.unused = [name for name in there if name not in (*PAIRS, TOOLS)]
        for number, row in table.rows(names):
            try:
                if isinstance(row, BadLine):
                    raise row
                read = self._row(row)
                self.reading.show(Example(" | ".join(_shown(read[name]) for name in self._columns)))
                self.reading.documents += 1
                yield read
            except BadLine as problem:
                self._bad_line(f"{file.path}, {table.unit} {number}: {problem}")
        self.reading.read_file(file_format)

    def _row(self, row: Row) -> dict[str, Any]:
        check_unread(row, Columns(text="prompt"))
        read = {name: self._said(row, name) for name in self._columns}
        if len({type(each) for each in read.values()}) > 1:
            raise BadLine(f"{', '.join(self._columns)} must all be text, or all be chats")
        tools = read_tools(row.get(TOOLS))
        if tools and (self._columns == PROMPTS or isinstance(read["prompt"], str)):
            raise BadLine("tools are rendered into chats of preference pairs alone; leave the column 'tools' out")
        check_characters(json.dumps([read, tools], ensure_ascii=False), "the row")
        return {**read, **({TOOLS: tools} if tools else {})} if self._columns == PAIRS else {**row, **read}

    def _said(self, row: Mapping[str, Any], name: str) -> Any:
        """The text or the chat messages in a column."""
        if name not in row:
            raise BadLine(f"no column {name!r}; its columns are {', '.join(row) or 'none'}")
        value = row[name]
        if isinstance(value, str):
            if not value:
                raise BadLine(f"column {name!r} is empty")
            return value
        if not isinstance(value, list):
            raise BadLine(f"column {name!r} must be text or a list of messages, got {shown(value)}")
        if self._tokenizer.chats is None:
            raise Unreadable(
                f"holds chats (in column {name!r}), and the tokenizer has no chat template. Write data.chat_template, "
                "or a data.tokenizer that has one"
            )
        messages = read_messages(value, learned=name != "prompt")
        if any(message.excluded for message in messages):
            raise BadLine(f"column {name!r} has a turn that is not to be trained on, which this train.method can't do")
        return [dict(message) for message in messages]

    def _bad_line(self, problem: str) -> None:
        if self._source.bad_lines == "stop":
            stop = "" if problem.endswith((".", "?")) else "."
            raise JobFileError(f"{_KEY}: {problem}{stop} Correct it, or write data.bad_lines: skip to leave it out")
        self.reading.skip_line(problem)

    def _leave_out(self, file: FoundFile) -> None:
        if file.named:
            what = "is text" if file.format == TEXT else "is no table"
            needed = ", ".join(self._columns)
            raise JobFileError(f"{_KEY}: {file.path} {what}, and this train.method needs a table of {needed}")
        self.reading.skip_file(file.path, "no table")


def _shown(said: Any) -> str:
    """A text, or the words of a chat."""
    return said if isinstance(said, str) else " / ".join(message["content"] for message in said)
