"""Tokens that are stored: made once, kept on disk, made again where files, tokenizer or the store changed."""

from __future__ import annotations

import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from veomni_core.errors import HostError, JobFileError
from veomni_trainer.data.corpus import Corpus, read_corpus
from veomni_trainer.data.documents import Document, Example
from veomni_trainer.data.reading import Reading
from veomni_trainer.data.token_store import DamagedStore, read_store, write_store
from veomni_trainer.data.tokens import ByteTokenizer
from veomni_trainer.job.data_section import DataSection


class CountingTokenizer(ByteTokenizer):
    """Counts the documents that it tokenizes."""

    def __init__(self) -> None:
        self.documents = 0

    def encode(self, examples: list[Example]) -> list[Document]:
        self.documents += len(examples)
        return super().encode(examples)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A hundred documents in a table."""
    path = tmp_path / "text.jsonl"
    path.write_text("".join(f'{{"text": "document {number} of some"}}\n' for number in range(100)), encoding="utf-8")
    return path


@pytest.fixture
def tokenizer() -> CountingTokenizer:
    return CountingTokenizer()


def _read(text: Path, cache: Path | bool, tokenizer: ByteTokenizer, **keys: object) -> Corpus:
    section = {"files": str(text), "sequence_length": 16, "cache": str(cache) if isinstance(cache, Path) else cache}
    return read_corpus(DataSection(**section, **keys), tokenizer)


def _ids(corpus: Corpus) -> list[list[int]]:
    return [row["input_ids"].tolist() for row in corpus.training]


def test_the_second_start_tokenizes_nothing(text: Path, cache: Path, tokenizer: CountingTokenizer) -> None:
    first = _read(text, cache, tokenizer)
    assert tokenizer.documents == 100
    _read(text, cache, tokenizer, packing=True)  # from the same tokens
    second = _read(text, cache, tokenizer)
    assert _ids(second) == _ids(first)
    assert tokenizer.documents == 100
    assert second.read == first.read
    assert [path.suffix for path in sorted(cache.iterdir())] == ["", ".lock"]


@pytest.mark.parametrize("change", ["content", "tokenizer", "keys"])
def test_what_decides_the_tokens_decides_which_are_used(
    text: Path, cache: Path, tokenizer: CountingTokenizer, change: str
) -> None:
    _read(text, cache, tokenizer)
    before = os.stat(text)
    if change == "content":  # of the same size and time
        text.write_text(text.read_text().replace("some", "none"))
        os.utime(text, ns=(before.st_atime_ns, before.st_mtime_ns))
    elif change == "tokenizer":
        tokenizer.fingerprint = "another"
    _read(text, cache, tokenizer, **({"bad_lines": "skip"} if change == "keys" else {}))
    assert tokenizer.documents == 200


def test_a_job_may_keep_no_tokens(
    text: Path, cache: Path, tokenizer: CountingTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VEOMNI_CACHE", str(cache))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = sorted(tmp_path.iterdir())
    assert _ids(_read(text, False, tokenizer)) == _ids(_read(text, False, tokenizer))
    assert tokenizer.documents == 200 and sorted(tmp_path.iterdir()) == before
    _read(text, True, tokenizer)
    assert (cache / "tokens").is_dir()


@pytest.mark.parametrize("damage", ["cut off", "changed", "removed", "index"])
def test_a_damaged_store_is_made_again_and_said(
    text: Path, cache: Path, tokenizer: CountingTokenizer, damage: str
) -> None:
    wanted = _ids(_read(text, cache, tokenizer))
    (store,) = (path for path in cache.iterdir() if path.is_dir())
    ids = store / "ids.bin"
    if damage == "cut off":
        os.truncate(ids, 100)
    elif damage == "changed":
        content = bytearray(ids.read_bytes())
        content[1000] ^= 1
        ids.write_bytes(content)
    elif damage == "removed":
        ids.unlink()
    else:
        (store / "index.json").write_text("{")
    corpus = _read(text, cache, tokenizer)
    assert _ids(corpus) == wanted and tokenizer.documents == 200
    assert f"note: the token cache {store} was damaged (" in corpus.describe()
    assert "damaged" not in _read(text, cache, tokenizer).describe()


def test_what_fails_leaves_nothing_behind(text: Path, cache: Path, tokenizer: CountingTokenizer) -> None:
    with text.open("a") as stream:
        stream.write("{broken\n")
    with pytest.raises(JobFileError, match="text.jsonl"):
        _read(text, cache, tokenizer)
    assert [path.suffix for path in cache.iterdir()] == [".lock"]
    cache.rename(cache.with_name("moved"))
    cache.touch()
    with pytest.raises(HostError, match=r"tokens can't be written to .*cache: .* Name another folder as data\.cache"):
        _read(text, cache, tokenizer)


def test_masks_are_stored_from_the_first_document_that_has_one(tmp_path: Path) -> None:
    masks = [None, np.array([False, True]), None]
    documents = [Document(np.array([number, 70_000], np.uint32), mask) for number, mask in enumerate(masks)]
    write_store(tmp_path, iter(documents), Reading(), 2**17)
    store = read_store(tmp_path)
    assert store.ids.tolist() == [0, 70_000, 1, 70_000, 2, 70_000] and store.ids.dtype == np.uint32
    assert store.learned is not None and store.learned.tolist() == [True, True, False, True, True, True]
    (tmp_path / "learned.bin").write_bytes(b"")
    with pytest.raises(DamagedStore, match=r"learned\.bin was changed or cut off"):
        read_store(tmp_path)


_PROCESS = """
import sys, time
from pathlib import Path
from veomni_trainer.data.corpus import read_corpus
from veomni_trainer.data.tokens import ByteTokenizer
from veomni_trainer.job.data_section import DataSection

class Slow(ByteTokenizer):
    def encode(self, examples):
        print("tokenizes", flush=True)
        time.sleep(1)
        return super().encode(examples)

corpus = read_corpus(DataSection(files=sys.argv[1], sequence_length=16, cache=sys.argv[2]), Slow())
print(sum(int(row["input_ids"].sum()) for row in corpus.training))
"""


@pytest.mark.thorough
def test_of_several_processes_one_tokenizes_and_the_others_wait(text: Path, cache: Path) -> None:
    command = [sys.executable, "-c", _PROCESS, str(text), str(cache)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=100)[0].split() for process in processes]
    assert sorted(map(len, outputs)) == [1, 2]
    assert outputs[0][-1] == outputs[1][-1]


def test_memory_does_not_grow_with_the_corpus(tmp_path: Path, cache: Path) -> None:
    """Allocations of reading, storing and mapping a corpus of 2 MB of documents, and of one that is eight times it."""
    line = '{"text": "' + "words " * 200 + '"}\n'
    peaks = []
    for times in (1, 8):
        text = tmp_path / f"{times}.jsonl"
        with text.open("w") as stream:
            stream.writelines(line for _ in range(1700 * times))
        tracemalloc.start()
        for _ in range(2):  # the first start and the second
            corpus = _read(text, cache, ByteTokenizer())
            assert len(corpus.training) > 100_000 * times and corpus.training[7]["labels"].shape == (16,)
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.reset_peak()
        tracemalloc.stop()
        assert isinstance(corpus.training._store.ids, np.memmap)
    (first, second), (first_of_8, second_of_8) = peaks[:2], peaks[2:]
    assert text.stat().st_size > 16e6
    assert first_of_8 < first + 1e6 and second_of_8 < second + 1e6
