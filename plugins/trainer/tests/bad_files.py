"""Files that can't be trained on, as people have them: what is in each, how the job names it, what the error says."""

from __future__ import annotations

import bz2
import gzip
import json
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.feather
import pyarrow.parquet

Write = Callable[[Path], None]


@dataclass(frozen=True)
class BadFile:
    """A file that the job names, its reading keys, and the error without ``data.files: `` and the file's path."""

    name: str
    content: bytes | Write
    message: str
    keys: dict[str, Any] = field(default_factory=dict)

    def write(self, folder: Path) -> Path:
        path = folder / self.name
        if isinstance(self.content, bytes):
            path.write_bytes(self.content)
        else:
            self.content(path)
        return path


def _lines(*rows: Any) -> bytes:
    return b"".join(row if isinstance(row, bytes) else json.dumps(row).encode() + b"\n" for row in rows)


def _chat(*turns: Any) -> bytes:
    return _lines({"messages": [{"role": role, "content": content} for role, content in turns]})


def _columns(**columns: Any) -> Write:
    return lambda path: pyarrow.parquet.write_table(pyarrow.table(columns), path)


def _damaged_parquet(path: Path) -> None:
    _columns(text=[f"row {number}" for number in range(9000)])(path)
    data = bytearray(path.read_bytes())
    data[1000:3000] = bytes(2000)
    path.write_bytes(data)


def _truncated_arrow(path: Path) -> None:
    table = pyarrow.table({"text": ["some text"] * 5000})
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=1000)
    path.write_bytes(path.read_bytes()[:-3000])


def _splits(path: Path) -> None:
    import datasets

    rows = datasets.Dataset.from_dict({"text": ["some text"]})
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(str(path))


def _dataset(path: Path) -> None:
    import datasets

    datasets.Dataset.from_dict({"text": ["some text"]}).save_to_disk(str(path))


def _dataset_without_rows_file(path: Path) -> None:
    _dataset(path)
    next(path.glob("*.arrow")).unlink()


def _zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.txt", "text")


_GOOD = [{"text": f"line {number}"} for number in range(1, 7)]
_TWICE = '{"b": 1, "b": 2}'
_SKIP = ". Correct it, or write data.bad_lines: skip to leave such lines out"
_NEITHER = ": neither text nor a table. If it is one, write data.format"
_WRITE = ". Write data.columns: {text: NAME}, {messages: NAME}, {input_ids: NAME} or {prompt: NAME, completion: NAME}"

BAD_FILES = {
    "a broken line": BadFile(
        "a.jsonl",
        _lines(*_GOOD, b'{"text": "broken\n'),
        ", line 7: not JSON: Unterminated string starting at column 10" + _SKIP,
    ),
    "a line of something else": BadFile(
        "a.jsonl", _lines(*_GOOD, ["a list"]), ", line 7: must hold an object, got ['a list'] (list)" + _SKIP
    ),
    "two objects in a line": BadFile(
        "a.jsonl", b'{"text": "a"} {"text": "b"}\n', ", line 1: not JSON: Extra data at column 15" + _SKIP
    ),
    "a key that is there twice": BadFile(
        "a.jsonl",
        _lines(*_GOOD, b'{"text": "a", "meta": [{"id": 1, "id": 2}]}\n'),
        ", line 7: not JSON: the key 'id' is there twice, with 1 (integer) and 2 (integer)" + _SKIP,
    ),
    "an object over several lines": BadFile(
        "a.jsonl",
        b'{\n "text": "a"\n}\n',
        ", line 1: not JSON: Expecting property name enclosed in double quotes at column 2" + _SKIP,
    ),
    "a line in another encoding": BadFile(
        "a.jsonl", _lines(*_GOOD, b'{"text": "\xe4"}\n'), ", line 7: not UTF-8 text: byte 0xe4 at offset 10" + _SKIP
    ),
    "UTF-16": BadFile(
        "a.jsonl",
        '{"text": "a"}\n'.encode("utf-16"),
        " can't be read by lines: it begins like UTF-16 text; save it as UTF-8",
    ),
    "a truncated gzip": BadFile(
        "a.jsonl.gz",
        gzip.compress(_lines(*({"text": str(number)} for number in range(20_000))))[:-9000],
        r" can't be read after line \d+: Truncated compressed stream",
    ),
    "a truncated bzip2": BadFile(
        "a.txt.bz2", bz2.compress(b"some text" * 50)[:-9], r" is unreadable: Truncated compressed stream"
    ),
    "a gzip that is none": BadFile(
        "a.jsonl.gz", _lines(*_GOOD), r" can't be read after line 0: zlib inflate failed: incorrect header check"
    ),
    "a gzip without its suffix": BadFile(
        "a.txt", gzip.compress(b"text"), " is not UTF-8 text: it begins like gzip; name it .gz"
    ),
    "parquet without its suffix": BadFile(
        "a.data", _columns(text=["a"]), " is not UTF-8 text: it begins like parquet; write data.format: parquet"
    ),
    "a JSON list named jsonl": BadFile(
        "a.jsonl", b'[{"text": "a"}]', " holds a JSON list, and no object per line; write data.format: json"
    ),
    "JSON lines named json": BadFile(
        "a.json", _lines(*_GOOD), " holds a JSON object per line; write data.format: jsonl"
    ),
    "a JSON object": BadFile(
        "package.json",
        b'{"name": "a"}',
        ' holds neither a list of objects nor {"data": [...]}. Convert it, or write data.format: text to train on its '
        "characters",
    ),
    "broken JSON": BadFile(
        "a.json", b'[{"text": "a"},\n{"text" "b"}]', " is not JSON: Expecting ':' delimiter at line 2, column 9"
    ),
    "a JSON list of texts": BadFile(
        "a.json", b'[{"text": "a"}, "b"]', ", row 2: must be an object, got 'b' (text)" + _SKIP
    ),
    "no text column": BadFile(
        "a.jsonl",
        _lines({"title": "a", "body": "b", "year": 3}),
        " has no column with a usual name; its columns are title (text), body (text), year (other)" + _WRITE,
    ),
    "text and a chat": BadFile(
        "a.jsonl",
        _lines({"text": "a", "messages": []}),
        " can be read in several ways; its columns are text (text), messages (list)" + _WRITE,
    ),
    "a wrong column": BadFile(
        "a.jsonl",
        _lines(*_GOOD),
        ", line 1: no column 'body'; its columns are text" + _SKIP,
        {"columns": {"text": "body"}},
    ),
    "a wrong column of parquet": BadFile(
        "a.parquet",
        _columns(text=["a"], id=[1]),
        " has no column 'body'; its columns are text, id",
        {"columns": {"text": "body"}},
    ),
    "a column that one line lacks": BadFile(
        "a.jsonl", _lines(*_GOOD, {"txt": "a"}), ", line 7: no column 'text'; its columns are txt" + _SKIP
    ),
    "null for a text": BadFile(
        "a.jsonl", _lines(*_GOOD, {"text": None}), ", line 7: column 'text' must be text, got nothing" + _SKIP
    ),
    "a number for a text": BadFile(
        "a.jsonl", _lines(*_GOOD, {"text": 7}), ", line 7: column 'text' must be text, got 7 (integer)" + _SKIP
    ),
    "numbers for texts in parquet": BadFile(
        "a.parquet", _columns(text=[1, 2]), ", row 1: column 'text' must be text, got 1 (integer)" + _SKIP
    ),
    "a null in parquet": BadFile(
        "a.parquet", _columns(text=["a", None]), ", row 2: column 'text' must be text, got nothing" + _SKIP
    ),
    "half a character": BadFile(
        "a.jsonl", b'{"text": "\\ud83d"}\n', ", line 1: column 'text' holds half a character (a lone surrogate)" + _SKIP
    ),
    "a chat without turns": BadFile("a.jsonl", _lines({"messages": []}), ", line 1: a chat without turns" + _SKIP),
    "a chat without an assistant": BadFile(
        "a.jsonl", _chat(("user", "hello")), ", line 1: a chat without a turn of the assistant" + _SKIP
    ),
    "an empty answer": BadFile(
        "a.jsonl",
        _chat(("user", "hello"), ("assistant", "")),
        ", line 1: turn 2 is an empty turn of the assistant" + _SKIP,
    ),
    "a wrong role": BadFile(
        "a.jsonl",
        _chat(("user", "hello"), ("asistant", "hello")),
        ", line 1: turn 2 has the role 'asistant'. Did you mean 'assistant'?" + _SKIP[1:],
    ),
    "ShareGPT's roles in OpenAI's keys": BadFile(
        "a.jsonl",
        _chat(("human", "hello"), ("gpt", "hello")),
        ", line 1: turn 1 has the role 'human'. Known: assistant, developer, system, tool, user." + _SKIP[1:],
    ),
    "turns without a role": BadFile(
        "a.jsonl",
        _lines({"messages": [{"speaker": "a", "content": "b"}]}),
        ", line 1: turn 1 has neither role nor from; its keys are speaker, content" + _SKIP,
    ),
    "texts for turns": BadFile(
        "a.jsonl", _lines({"messages": ["hello"]}), ", line 1: turn 1 must be a mapping, got 'hello' (text)" + _SKIP
    ),
    "a number for a turn's content": BadFile(
        "a.jsonl",
        _chat(("user", 3), ("assistant", "3")),
        ", line 1: the content of turn 1 must be text, got 3 (integer)" + _SKIP,
    ),
    "an image in a turn": BadFile(
        "a.jsonl",
        _chat(("user", [{"type": "text", "text": "a"}, {"type": "image_url"}]), ("assistant", "3")),
        ", line 1: turn 1 has a part of type 'image_url'; only text is trained on" + _SKIP,
    ),
    "a turn with a weight": BadFile(
        "a.jsonl",
        _lines({"messages": [{"role": "assistant", "content": "a", "weight": 2}]}),
        ", line 1: turn 1 has weight: 2, which is neither true nor false; leave the key or the turn out" + _SKIP,
    ),
    "a call with broken arguments": BadFile(
        "a.jsonl",
        _lines({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "{"}}]}]}),
        ", line 1: the arguments of a call in turn 1 are not JSON: '{' (text): Expecting property name enclosed in "
        "double quotes: line 1 column 2 (char 1)" + _SKIP,
    ),
    "a call whose arguments have a key twice": BadFile(
        "a.jsonl",
        _lines({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": _TWICE}}]}]}),
        f", line 1: the arguments of a call in turn 1 are not JSON: '{_TWICE}' (text): the key 'b' is there twice, "
        "with 1 (integer) and 2 (integer)" + _SKIP,
    ),
    "an empty completion": BadFile(
        "a.jsonl", _lines({"prompt": "a", "completion": ""}), ", line 1: column 'completion' is empty" + _SKIP
    ),
    "a record that is too short": BadFile(
        "a.csv", b"id,text\n1,a\n2\n", ", line 3: 1 values, and the header has 2" + _SKIP
    ),
    "an open quote": BadFile(
        "a.csv",
        b'id,text\n1,"a\n2,b\n',
        ", line 3: not CSV: unexpected end of data" + _SKIP,
        {"columns": {"text": "text"}},
    ),
    "an object without columns": BadFile(
        "a.jsonl", b'{}\n{"text": "a"}\n', ", line 1: no column 'text'; its columns are none" + _SKIP
    ),
    "objects without columns": BadFile("a.json", b"[{}]", ", row 1: an object without columns" + _SKIP),
    "a split of JSON lines": BadFile(
        "a.jsonl",
        _lines(*_GOOD),
        " is jsonl, and data.split is for folders of save_to_disk and data sets of the Hub. Remove it, and choose "
        "files by data.pattern",
        {"split": "train"},
    ),
    "columns of a text": BadFile(
        "a.txt",
        b"text",
        " is text, and data.columns is for tables. Remove it, or write data.format",
        {"columns": {"text": "text"}},
    ),
    "a blank header": BadFile("a.csv", b"\ntext\n", " has no header: its first line is blank"),
    "two columns of one name": BadFile("a.csv", b"text,text\na,b\n", " names columns twice in its header: text"),
    "CSV in another encoding": BadFile(
        "a.csv", b"id,text\n1,\xe4\n", " can't be read: line 2: not UTF-8 text: byte 0xe4 at offset 2"
    ),
    "a header alone": BadFile("a.tsv", b"text\n", " is without rows"),
    "an empty table": BadFile("a.jsonl", b"\n\n", " is without rows"),
    "an empty file": BadFile("a.csv", b"", " is empty"),
    "a compressed CSV file without a line": BadFile(
        "a.csv.gz", gzip.compress(b""), " has no header; its first line names the columns"
    ),
    "no parquet": BadFile("a.parquet", b"PAR1 and no more", r" is not parquet: .*"),
    "damaged parquet": BadFile("a.parquet", _damaged_parquet, r" can't be read after row \d+: .*"),
    "no arrow": BadFile("a.arrow", b"ARROW1 and no more", r" is not arrow: .*"),
    "a truncated arrow stream": BadFile("a.arrow", _truncated_arrow, r" can't be read after row \d+: .*"),
    "a split that is missing": BadFile(
        "saved",
        _splits,
        " holds the splits train, test, and there is no split 'validation'; write one of them as data.split",
        {"split": "validation"},
    ),
    "no split of several": BadFile(
        "saved", _splits, " holds the splits train, test, and data.split names none; write one of them as data.split"
    ),
    "a split of none": BadFile(
        "saved", _dataset, " holds one dataset without splits; leave data.split 'train' out", {"split": "train"}
    ),
    "a dataset without its rows": BadFile("saved", _dataset_without_rows_file, r" is not a saved dataset: .*"),
    "a zip archive": BadFile("a.zip", _zip, " is an archive" + _NEITHER),
    "a checkpoint": BadFile("model.safetensors", b"\0", " is a checkpoint" + _NEITHER),
    "a text file as parquet": BadFile("a.txt", b"some text", r" is not parquet: .*", {"format": "parquet"}),
}
