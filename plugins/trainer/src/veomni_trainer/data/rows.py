"""Rows of tables for TRL's trainers: pairs of preferences, and prompts whose completions are judged."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
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
from veomni_trainer.data.labels import read_class, read_verdict
from veomni_trainer.data.messages import check_characters, read_messages, read_tools
from veomni_trainer.data.read import open_table
from veomni_trainer.data.reading import BadLine, Reading, Unreadable
from veomni_trainer.data.sequences import Counts
from veomni_trainer.data.tables import Row
from veomni_trainer.data.tokens import Tokenizer
from veomni_trainer.job.method_keys import PAIRS, PROMPTS
from veomni_trainer.job.source_keys import Columns, Source
from veomni_trainer.job.train_section import TrainSection

TOOLS = "tools"
_KEY = "data.files"
_WHAT = {PAIRS: "preference pairs", PROMPTS: "prompts"}


@dataclass(frozen=True)
class RowCounts(Counts):
    """How many rows were read, of what, and how often a training's epoch takes each."""

    what: str = "rows"

    def describe(self) -> str:
        return f"{self.sequences:,} {self.what}"


def read_rows(source: Source, tokenizer: Tokenizer, train: TrainSection) -> Corpus:
    """The rows of a source, with the columns that ``train.method`` learns from.

    Prompts and what follows them are text, or lists of chat messages. Other columns of prompts are kept, for the reward.

    Raises:
        JobFileError: there is nothing to read, a column is missing, a line is broken and ``bad_lines`` is ``stop``, or
            chats have no template.
    """
    reader = _RowReader(source, tokenizer, train)
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
    repeated = train.drawn.num_generations if train.drawn else 1
    what = _WHAT.get(train.columns) or ("labelled texts" if train.method == "classify" else "judged completions")
    counts = RowCounts(0, len(rows), what=what)
    read = ReadSource(_KEY, reader.reading, counts, source.weight, len(rows) * repeated, 0)
    return Corpus(dataset, {}, (read,), tokenizer.end)


def _dataset(columns: dict[str, list[Any]]) -> Any:
    """The columns as ``datasets`` holds them: what is nested as JSON. Arrow would give each mapping the keys of all."""
    nested = {name for name, values in columns.items() if any(isinstance(each, (dict, list)) for each in values)}
    plain: Any = Dataset.from_dict({name: values for name, values in columns.items() if name not in nested})
    features = Features({name: Json() if name in nested else plain.features[name] for name in columns})
    return Dataset.from_dict(columns, features=features)


def check_lengths(corpus: Corpus, tokenizer: PreTrainedTokenizerBase, train: TrainSection, longest: int) -> Corpus:
    """The corpus, with a note where texts of classes are longer than ``longest`` tokens.

    Raises:
        JobFileError: a prompt leaves no room for what follows it, or TRL's reward trainer would leave a pair out.
    """
    reserved = train.drawn.max_completion_length if train.drawn else 1
    beside = f"train.{train.method}.max_completion_length" if train.drawn else "the first token of an answer"
    room, rows = longest - reserved, cast("Iterable[dict[str, Any]]", corpus.training)
    if train.method == "classify":
        cut = sum(len(prompt_ids(row, tokenizer, train.columns[0])) > longest for row in rows)
        note = f"warning: {cut:,} texts are longer than data.sequence_length {longest:,}, and are cut off there"
        return replace(corpus, notes=(*corpus.notes, note)) if cut else corpus
    for number, row in enumerate(rows, start=1):
        ids = prompt_ids(row, tokenizer)
        if train.method == "reward" and (most := max(len(_whole(row, name, tokenizer)) for name in PAIRS[1:])) > longest:
            raise JobFileError(
                f"{_KEY}: pair {number} has {most:,} tokens, and data.sequence_length is {longest:,}; raise it, or "
                "leave the pair out. A reward is the score of the last token"
            )
        if len(ids) > room:
            raise JobFileError(
                f"{_KEY}: prompt {number} has {len(ids):,} tokens, and data.sequence_length leaves {room:,} beside {beside}; "
                "raise data.sequence_length, or leave the prompt out"
            )
    return corpus


def _whole(row: Mapping[str, Any], name: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens of a row's prompt with the answer ``name``, as TRL's reward trainer counts them."""
    said = row["prompt"] + row[name]
    if isinstance(said, str):
        end = str(tokenizer.eos_token)
        return list(tokenizer(said if said.endswith(end) else said + end)["input_ids"])  # type: ignore[arg-type]
    encoded: Any = tokenizer.apply_chat_template(said, tools=row.get(TOOLS), return_dict=True)
    return list(encoded["input_ids"])


def prompt_ids(row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, name: str = "prompt") -> list[int]:
    """The tokens of a row's prompt, or of the text in another column."""
    prompt, tools = row[name], row.get(TOOLS)
    if isinstance(prompt, str):
        return list(tokenizer(prompt)["input_ids"])  # type: ignore[arg-type]
    encoded: Any = tokenizer.apply_chat_template(prompt, tools=tools, add_generation_prompt=True, return_dict=True)
    return list(encoded["input_ids"])


class _RowReader:
    """Reads the tables of one source; ``reading`` counts what was read and what was left out."""

    def __init__(self, source: Source, tokenizer: Tokenizer, train: TrainSection) -> None:
        self._source, self._tokenizer, self._columns = source, tokenizer, train.columns
        self._classifies, self._draws = train.method == "classify", train.columns == PROMPTS
        self._label = self._columns[-1] if train.method in ("kto", "classify") else ""
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
        used = (*self._columns, TOOLS, *unread_that_matter(Columns(text="prompt"), there))
        names = tuple(name for name in there if self._draws or name in used)
        if not self._draws and not self.reading.unused:
            self.reading.unused = [name for name in there if name not in (*self._columns, TOOLS)]
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
        said = {name: self._said(row, name) for name in self._columns if name != self._label}
        if len({type(each) for each in said.values()}) > 1:
            raise BadLine(f"{', '.join(said)} must all be text, or all be chats")
        read = said | ({self._label: self._read_label(row)} if self._label else {})
        tools = read_tools(row.get(TOOLS))
        if tools and (self._draws or not isinstance(read.get("prompt"), list)):
            raise BadLine("tools are rendered into chats of preference pairs alone; leave the column 'tools' out")
        check_characters(json.dumps([read, tools], ensure_ascii=False), "the row")
        return {**row, **read} if self._draws else {**read, **({TOOLS: tools} if tools else {})}

    def _read_label(self, row: Row) -> bool | str:
        if self._label not in row:
            raise BadLine(f"no column {self._label!r}; its columns are {', '.join(row) or 'none'}")
        return (read_class if self._classifies else read_verdict)(row[self._label], self._label)

    def _said(self, row: Mapping[str, Any], name: str) -> Any:
        """The text or the chat messages in a column."""
        if name not in row:
            raise BadLine(f"no column {name!r}; its columns are {', '.join(row) or 'none'}")
        value = row[name]
        if isinstance(value, str):
            if not value:
                raise BadLine(f"column {name!r} is empty")
            return value
        if not isinstance(value, list) or self._classifies:
            wanted = "text" if self._classifies else "text or a list of messages"
            raise BadLine(f"column {name!r} must be {wanted}, got {shown(value)}")
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
    """A text, a label, or the words of a chat."""
    return " / ".join(message["content"] for message in said) if isinstance(said, list) else str(said)
