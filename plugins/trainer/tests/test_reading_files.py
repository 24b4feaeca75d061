"""Tables, chats and pairs as documents: what is read, in which order, and what is left out and counted."""

from __future__ import annotations

import gzip
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizers import CHATML, byte_level

from veomni_core.errors import JobFileError
from veomni_trainer.data.documents import Document
from veomni_trainer.data.read import read_documents
from veomni_trainer.data.reading import Reading
from veomni_trainer.data.tokens import ByteTokenizer, PretrainedTokenizer, Tokenizer
from veomni_trainer.job.source_keys import Source

TOKENIZER = PretrainedTokenizer(byte_level(CHATML), end=0)
BYTES = ByteTokenizer()
CHAT = [{"role": "user", "content": "What is the weather?"}, {"role": "assistant", "content": "It is sunny."}]
PARTS = ["the quick", "brown fox"]


def _read(path: Path | list[str], tokenizer: Tokenizer = BYTES, **keys: Any) -> tuple[list[Document], Reading]:
    reading = Reading()
    files = path if isinstance(path, list) else str(path)
    return list(read_documents(Source(files=files, **keys), tokenizer, reading)), reading


def _texts(documents: list[Document]) -> list[str]:
    assert all(document.ids[-1] == BYTES.end for document in documents)
    return [bytes(document.ids[:-1].astype("uint8")).decode() for document in documents]


def _as_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def _jsonl(folder: Path, texts: list[str]) -> Path:
    return _as_jsonl(folder / "a.jsonl", [{"text": text, "id": number} for number, text in enumerate(texts)])


def _jsonl_gz(folder: Path, texts: list[str]) -> Path:
    path = folder / "a.jsonl.gz"
    lines = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\r\n" for text in texts)
    path.write_bytes(gzip.compress(lines.encode()))
    return path


def _jsonl_zst(folder: Path, texts: list[str]) -> Path:
    path = folder / "a.jsonl.zst"
    with pyarrow.CompressedOutputStream(str(path), "zstd") as file:
        file.write(_jsonl(folder, texts).read_bytes())
    return path


def _json(folder: Path, texts: list[str]) -> Path:
    path = folder / "a.json"
    path.write_text(json.dumps({"data": [{"text": text} for text in texts]}), encoding="utf-8-sig")
    return path


def _csv(folder: Path, texts: list[str]) -> Path:
    path = folder / "a.csv"
    pyarrow.csv.write_csv(_table(texts), path)
    return path


def _parquet(folder: Path, texts: list[str]) -> Path:
    path = folder / "a.parquet"
    pyarrow.parquet.write_table(_table(texts), path)
    return path


def _feather(folder: Path, texts: list[str]) -> Path:
    path = folder / "a.feather"
    pyarrow.feather.write_feather(_table(texts), path)
    return path


def _stream(folder: Path, texts: list[str]) -> Path:
    path = folder / "a.arrow"
    table = _table(texts)
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    return path


def _saved(folder: Path, texts: list[str]) -> Path:
    path = folder / "saved"
    datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": texts})}).save_to_disk(str(path))
    return path


def _table(texts: list[str]) -> pyarrow.Table:
    return pyarrow.table({"id": list(range(len(texts))), "text": texts})


TABLES = [_jsonl, _jsonl_gz, _jsonl_zst, _json, _csv, _parquet, _feather, _stream, _saved]
# CSV has no way to write a zero character; a lone surrogate is half a character, and no text.
TEXTS = st.lists(
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1), min_size=1, max_size=8
)


@pytest.mark.thorough(one_per=[])
@pytest.mark.parametrize("write", TABLES)
@settings(max_examples=25, deadline=None)
@given(texts=TEXTS)
def test_a_text_has_the_same_tokens_from_any_table(write: Callable[[Path, list[str]], Path], texts: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        documents, reading = _read(write(Path(folder), texts))
    assert _texts(documents) == texts
    assert reading.documents == len(texts) and not reading.bad_lines


def test_rows_of_several_files_are_read_in_the_order_of_their_paths(tmp_path: Path) -> None:
    for name, texts in {"b": ["3"], "a": ["1", "2"], "c": ["4"]}.items():
        (tmp_path / name).mkdir()
        _jsonl(tmp_path / name, texts)
    _saved(tmp_path, ["5"])
    documents, reading = _read(tmp_path)
    assert _texts(documents) == ["1", "2", "3", "4", "5"]
    assert reading.describe() == "3 jsonl, 1 dataset: 5 documents, text in column 'text'"


def test_csv_values_are_texts_and_a_line_may_be_very_long(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("\ufefftext\n007\nNA\n\n" + "x" * 10_000_000 + "\n", encoding="utf-8")
    documents, _ = _read(tmp_path / "a.tsv")
    assert _texts(documents)[:2] == ["007", "NA"]
    assert len(documents[2].ids) == 10_000_001


def test_a_format_may_be_written_where_the_suffix_says_another(tmp_path: Path) -> None:
    _as_jsonl(tmp_path / "a.txt", [{"text": "a row"}])
    assert _texts(_read(tmp_path / "a.txt", format="jsonl")[0]) == ["a row"]
    assert _texts(_read(tmp_path / "a.txt")[0]) == ['{"text": "a row"}\n']
    (tmp_path / "a.txt").rename(tmp_path / "a.json")
    assert _texts(_read(tmp_path / "a.json", format="text")[0]) == ['{"text": "a row"}\n']


def test_documents_come_before_the_end_of_a_file_is_read(tmp_path: Path) -> None:
    path = _jsonl(tmp_path, ["a text"] * 600)
    path.write_text(path.read_text() + "{", encoding="utf-8")
    reading = Reading()
    documents = read_documents(Source(files=str(path)), BYTES, reading)
    assert _texts([next(documents)]) == ["a text"]
    assert reading.documents < 600
    with pytest.raises(JobFileError, match="line 601: not JSON"):
        list(documents)


def test_bad_lines_are_left_out_where_the_job_says_so(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": \n{"text": "a"}\n{"text": null}\n\n{"text": ""}\n{"text": "b"}\n3\n', encoding="utf-8")
    documents, reading = _read(path, bad_lines="skip")
    assert _texts(documents) == ["a", "b"]
    assert (reading.documents, reading.bad_lines, reading.empty_rows) == (2, 3, 1)
    assert [line.partition(f"{path}, ")[2][:6] for line in reading.first_bad_lines] == ["line 1", "line 3", "line 7"]
    assert "left out: 1 rows without text, 3 bad lines (" in reading.describe()
    assert Reading(**json.loads(json.dumps(vars(reading)))) == reading


def test_a_file_with_bad_lines_alone_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("1\n2\n3\n4\n", encoding="utf-8")
    with pytest.raises(JobFileError, match=r"a\.jsonl holds no text: .* 4 bad lines \(.*line 1: .*; \.\.\.\)"):
        _read(tmp_path / "a.jsonl", bad_lines="skip")


def test_what_is_neither_text_nor_a_table_is_left_out_of_a_folder(tmp_path: Path) -> None:
    _jsonl(tmp_path, ["a text"])
    for name in ("a.zip", "b.zip", "model.safetensors", "binary.bin"):
        (tmp_path / name).write_bytes(b"\0\1")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "empty.jsonl").touch()
    documents, reading = _read(tmp_path)
    assert _texts(documents) == ["a text"]
    assert reading.describe() == (
        "1 jsonl: 1 documents, text in column 'text'; left out: 2 an archive (a.zip, b.zip), 1 not UTF-8 text "
        "(binary.bin), 2 empty (empty.jsonl, empty.txt), 1 a checkpoint (model.safetensors)"
    )


def test_links_that_are_not_followed_are_named(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    _jsonl(tmp_path / "a", PARTS)
    (tmp_path / "a" / "up").symlink_to(tmp_path)
    (tmp_path / "a" / "gone.jsonl").symlink_to(tmp_path / "nowhere")
    for name, left_out in {"a": "1 linked folders (up), 1 broken links (gone.jsonl)", "a/*l": "1 broken links"}.items():
        documents, reading = _read(tmp_path / name)
        assert _texts(documents) == PARTS and f"left out: {left_out}" in reading.describe()
    (tmp_path / "a" / "b" / "up").symlink_to(tmp_path)
    with pytest.raises(JobFileError, match=r"no file in .*; folders that are linked, as .*up, must be named in data"):
        _read(tmp_path / "a" / "b")


def test_tables_among_text_files_are_the_user_s_to_decide(tmp_path: Path) -> None:
    _jsonl(tmp_path, ["a text"])
    (tmp_path / "README.md").write_text("about these rows", encoding="utf-8")
    with pytest.raises(JobFileError, match=r"a\.jsonl is jsonl, and .*README\.md is text\. Narrow data\.pattern, "):
        _read(tmp_path)
    assert _texts(_read(tmp_path, pattern="*.jsonl")[0]) == ["a text"]
    assert len(_read(tmp_path, format="text")[0]) == 2


def test_all_tables_have_the_columns_of_the_first(tmp_path: Path) -> None:
    _parquet(tmp_path, ["a text"])
    pyarrow.parquet.write_table(pyarrow.table({"body": ["b"]}), tmp_path / "b.parquet")
    with pytest.raises(JobFileError, match=r"b\.parquet has no column 'text'; its columns are body"):
        _read(tmp_path)


def test_the_only_column_of_texts_is_the_text(tmp_path: Path) -> None:
    path = _as_jsonl(tmp_path / "a.jsonl", [{"body": "a text"}])
    documents, reading = _read(path)
    assert _texts(documents) == ["a text"]
    assert reading.columns == "text in column 'body'"


@pytest.mark.parametrize("completion", ["completion", "response", "output", "answer"])
def test_of_a_pair_the_completion_and_the_end_are_learned(tmp_path: Path, completion: str) -> None:
    path = _as_jsonl(tmp_path / "a.jsonl", [{"prompt": "höw?", completion: "sö"}])
    (document,), reading = _read(path)
    assert bytes(document.ids[:-1].astype("uint8")).decode() == "höw?sö"
    assert document.learned is not None
    assert document.learned.tolist() == [False] * 5 + [True] * 4
    assert reading.columns == f"prompts in column 'prompt' with completions in {completion!r}, loss on the completion"
    assert _read(path, loss_on="all")[0][0].learned is None


def test_columns_are_written_as_what_they_hold(tmp_path: Path) -> None:
    path = _as_jsonl(tmp_path / "a.jsonl", [{"question": "2 + 2?", "reply": " 4", "text": "unused"}])
    columns = {"prompt": "question", "completion": "reply"}
    (document,), _ = _read(path, TOKENIZER, columns=columns)
    assert document.learned is not None
    assert TOKENIZER.chats is not None
    assert TOKENIZER.chats.decode(document.ids[document.learned]) == " 4<|endoftext|>"


def _chats_jsonl(folder: Path) -> Path:
    return _as_jsonl(folder / "a.jsonl", [{"prompt": "unused", "messages": CHAT}, {"messages": CHAT}])


def _chats_parquet(folder: Path) -> Path:
    turns = [{**CHAT[0], "tool_calls": None, "name": "me"}, {**CHAT[1], "tool_calls": []}]
    pyarrow.parquet.write_table(pyarrow.table({"messages": [turns, CHAT]}), folder / "a.parquet")
    return folder / "a.parquet"


def _chats_sharegpt(folder: Path) -> Path:
    turns = [{"from": role, "value": turn["content"]} for role, turn in zip(("human", "gpt"), CHAT, strict=True)]
    return _as_jsonl(folder / "a.jsonl", [{"conversations": turns}] * 2)


def _chats_csv(folder: Path) -> Path:
    table = pyarrow.table({"id": [1, 2], "messages": [json.dumps(CHAT)] * 2})
    pyarrow.csv.write_csv(table, folder / "a.csv")
    return folder / "a.csv"


def _chats_saved(folder: Path) -> Path:
    datasets.Dataset.from_dict({"messages": [CHAT, CHAT]}).save_to_disk(str(folder / "saved"))
    return folder / "saved"


@pytest.mark.parametrize("write", [_chats_jsonl, _chats_parquet, _chats_sharegpt, _chats_csv, _chats_saved])
def test_a_chat_is_the_same_from_any_table(tmp_path: Path, write: Callable[[Path], Path]) -> None:
    written = {"columns": {"messages": "messages"}} if write is _chats_csv else {}
    documents, reading = _read(write(tmp_path), TOKENIZER, **written)
    backend = TOKENIZER.chats
    assert backend is not None
    expected: Any = backend.apply_chat_template(CHAT)
    for document in documents:
        assert document.ids.tolist() == expected["input_ids"]
        assert document.learned is not None
        assert backend.decode(document.ids[document.learned]) == "It is sunny.<|im_end|>\n"
    assert reading.documents == 2
    assert reading.columns.endswith("loss on the assistant's turns")


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        (
            BYTES,
            r"a\.jsonl holds chats \(in column 'messages'\), and the tokenizer has no chat template",
        ),
        (PretrainedTokenizer(byte_level(None), 0), r"has no chat template\. Write data\.chat_template, or"),
    ],
)
def test_a_chat_needs_a_template(tmp_path: Path, tokenizer: Tokenizer, message: str) -> None:
    with pytest.raises(JobFileError, match=message):
        _read(_chats_jsonl(tmp_path), tokenizer)


def test_a_source_is_read_as_the_same_documents_twice(tmp_path: Path) -> None:
    def ids() -> Iterator[list[int]]:
        return (document.ids.tolist() for document in _read(tmp_path, TOKENIZER)[0])

    _jsonl(tmp_path, PARTS * 700)
    _parquet(tmp_path, PARTS)
    assert list(ids()) == list(ids())
