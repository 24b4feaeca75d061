"""Data sets of the Hub, saved ones and parquet: their rows mean what they mean in a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
import yaml
from hub_caches import HubCache
from huggingface_hub import constants
from small_tokenizers import CHATML, byte_level

from veomni_core.errors import JobFileError
from veomni_trainer.data.read import read_documents
from veomni_trainer.data.reading import Reading
from veomni_trainer.data.rows import read_rows
from veomni_trainer.data.tokens import ByteTokenizer, PretrainedTokenizer
from veomni_trainer.job.source_keys import Source
from veomni_trainer.job.train_section import TrainSection

BYTES, CHATS = ByteTokenizer(), PretrainedTokenizer(byte_level(CHATML), end=0)
TRAIN = {"output_dir": "run", "steps": 1}
CALLS: list[dict[str, Any]] = [{"city": "Rome", "unit": None}, {"x": 1, "y": [{"a": 1}, {"b": None}]}]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HubCache:
    cache = HubCache(tmp_path / "hub")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache.folder))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "prepared")
    return cache


def _classes(files: Path | str, **keys: Any) -> list[Any]:
    train = TrainSection(**TRAIN, method="classify")
    return [row["label"] for row in read_rows(Source(files=str(files), **keys), BYTES, train).training]


def _lines(*rows: Any) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def _chats() -> list[dict[str, Any]]:
    call = [{"type": "function", "function": {"name": "f", "arguments": each}} for each in CALLS]
    asked = {"role": "user", "content": "q"}
    return [{"messages": [asked, {"role": "assistant", "content": "a", "tool_calls": [each]}]} for each in call]


@pytest.mark.parametrize(
    ("name", "text", "keys"),
    [
        pytest.param("a.jsonl", _lines({"text": "ab"}, {"text": 7}), {"bad_lines": "skip"}, id="of several kinds"),
        pytest.param("a.csv", 'text,id\nNone,1\nNA,2\n007,3\n"a\nb",4\n', {}, id="CSV"),
        pytest.param("a.csv", "text;id\nab;1\n", {"separator": ";"}, id="semicolons"),
        pytest.param("a.tsv", 'text\tid\nsaid "no"\t1\n', {}, id="TSV"),
        pytest.param("a.json", json.dumps({"data": [{"text": "ab"}]}), {}, id="JSON"),
        pytest.param("a.txt", "one\n\ntwo\n", {}, id="text"),
        pytest.param("a.jsonl", _lines(*_chats()), {}, id="calls"),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_files_of_the_hub_are_read_as_files(
    hub: HubCache, tmp_path: Path, name: str, text: str, keys: dict[str, Any], streaming: bool
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / name).write_text(text, encoding="utf-8")
    hub.add("acme/rows", tmp_path / "data", "dataset")
    tokenizer = CHATS if "messages" in text else BYTES
    here, there = (
        [each.ids.tolist() for each in read_documents(Source(files=files, **keys), tokenizer, Reading(), streaming)]
        for files in (str(tmp_path / "data" / name), "acme/rows")
    )
    assert here == there and here


def test_a_table_of_the_hub_with_another_delimiter_is_refused_unless_it_states_it(
    hub: HubCache, tmp_path: Path
) -> None:
    rows = tmp_path / "rows"
    rows.mkdir()
    (rows / "train.csv").write_text("text;label\nab;007\n", encoding="utf-8")
    hub.add("acme/rows", rows, "dataset")
    with pytest.raises(JobFileError, match=r"train\.csv has one column, 'text;label'.*write data\.separator: ';'"):
        [*read_documents(Source(files="acme/rows"), BYTES, Reading())]
    configs = [{"config_name": "default", "data_files": "*.csv", "sep": ";"}]
    (rows / "README.md").write_text(f"---\n{yaml.safe_dump({'configs': configs})}---\n", encoding="utf-8")
    hub.add("acme/stated", rows, "dataset")
    assert _classes("acme/stated") == ["007"]


@pytest.mark.parametrize("kind", ["saved", "parquet"])
def test_json_in_a_data_set_is_what_it_encodes(tmp_path: Path, kind: str) -> None:
    file, path = tmp_path / "rows.jsonl", tmp_path / kind
    rows = [{**row, "label": label} for row, label in zip(_chats(), ("x", 7), strict=True)]
    file.write_text(_lines(*rows), encoding="utf-8")
    made = datasets.Dataset.from_list(rows, on_mixed_types="use_json")
    made.save_to_disk(str(path)) if kind == "saved" else made.to_parquet(path)
    form = None if kind == "saved" else "parquet"
    here, there = (
        [each.ids.tolist() for each in read_documents(source, CHATS, Reading())]
        for source in (Source(files=str(file)), Source(files=str(path), format=form))
    )
    assert here == there
    texts = made.remove_columns("messages").add_column("text", ["ab", "cd"])
    texts.to_parquet(tmp_path / "texts.parquet")
    assert _classes(tmp_path / "texts.parquet") == ["x", "7"]


@pytest.mark.parametrize("kind", ["saved", "parquet", "hub"])
def test_classes_have_their_names(hub: HubCache, tmp_path: Path, kind: str) -> None:
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["negative", "positive"])}
    )
    columns = {"text": ["ab", "cd", "ef"], "label": [1, 0, -1]}
    made, path = datasets.Dataset.from_dict(columns, features=features), tmp_path / "rows"
    path.mkdir()
    made.save_to_disk(str(path)) if kind == "saved" else made.to_parquet(path / "train.parquet")
    if kind == "hub":
        hub.add("acme/rows", path, "dataset")
    files = "acme/rows" if kind == "hub" else path
    assert _classes(files, bad_lines="skip") == ["positive", "negative"]
    with pytest.raises(JobFileError, match="row 3: column 'label' has -1, which is none of its classes"):
        _classes(files)
