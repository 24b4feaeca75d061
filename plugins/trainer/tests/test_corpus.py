"""Text that is found, read, tokenized and cut, and text that isn't."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from veomni_core.errors import JobFileError
from veomni_trainer.data.corpus import read_corpus
from veomni_trainer.data.documents import Example
from veomni_trainer.data.read import read_documents
from veomni_trainer.data.reading import Reading
from veomni_trainer.data.tokens import ByteTokenizer, load_tokenizer
from veomni_trainer.job.data_section import STDLIB, DataSection
from veomni_trainer.job.source_keys import Source


def _read(files: str | list[str], pattern: str = "**/*") -> tuple[list[bytes], Reading]:
    reading = Reading()
    documents = list(read_documents(Source(files=files, pattern=pattern), ByteTokenizer(), reading))
    assert all(document.ids[-1] == ByteTokenizer.end and document.learned is None for document in documents)
    return [bytes(document.ids[:-1].astype(np.uint8)) for document in documents], reading


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two documents in two levels, and three files that are none."""
    (tmp_path / "deep").mkdir()
    (tmp_path / "b.txt").write_text("bb", encoding="utf-8")
    (tmp_path / "deep" / "a.txt").write_text("ä", encoding="utf-8")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "latin.txt").write_bytes("ä".encode("latin-1"))
    (tmp_path / "zero.bin").write_bytes(b"ab\0cd")
    return tmp_path


def test_a_folder_is_read_in_order_and_what_is_no_text_is_counted(folder: Path) -> None:
    documents, reading = _read(str(folder))
    assert documents == [b"bb", "ä".encode()]
    assert reading.describe() == "2 files; left out: 1 empty (empty.txt), 2 not UTF-8 text (latin.txt, zero.bin)"


def test_a_pattern_narrows_a_folder(folder: Path) -> None:
    assert _read(str(folder), "deep/*.txt")[0] == ["ä".encode()]


def test_globs_files_and_lists_of_them(folder: Path) -> None:
    assert _read(str(folder / "**" / "[ab].txt"))[0] == [b"bb", "ä".encode()]
    documents, reading = _read([str(folder / "deep" / "a.txt"), str(folder / "*.txt"), str(folder / "b.txt")])
    assert documents == ["ä".encode(), b"bb"]
    assert "1 named twice (b.txt)" in reading.describe()


def test_the_standard_library_is_on_every_machine() -> None:
    reading = Reading()
    source = Source(files=STDLIB)
    size = sum(len(document.ids) for document in read_documents(source, ByteTokenizer(), reading))
    assert reading.documents > 300
    assert size > 3_000_000


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("b.tx", "there is no file or folder {folder}/b.tx. Did you mean 'b.txt'?"),
        ("empty.txt", "{folder}/empty.txt is empty"),
        ("latin.txt", "{folder}/latin.txt is not UTF-8 text: byte 0xe4 at offset 0"),
        ("zero.bin", "{folder}/zero.bin is not UTF-8 text: a zero byte at offset 2"),
        ("*.py", "no file matches '{folder}/*.py'"),
        ("*.bin", "{folder}/*.bin holds no text: 0 files; left out: 1 not UTF-8 text (zero.bin)"),
    ],
)
def test_what_is_named_must_be_there_and_be_text(folder: Path, name: str, message: str) -> None:
    with pytest.raises(JobFileError) as caught:
        _read(str(folder / name))
    assert str(caught.value) == "data.files: " + message.format(folder=folder)


def test_a_folder_without_a_match_is_named(folder: Path) -> None:
    with pytest.raises(JobFileError, match=r"no file in .* matches data.pattern '\*\.rs'"):
        _read(str(folder), "*.rs")
    with pytest.raises(JobFileError, match=r"data\.files names no file"):
        _read([])


def test_documents_are_joined_by_their_end_and_cut(folder: Path) -> None:
    section = DataSection(files=str(folder), sequence_length=2)
    corpus = read_corpus(section, ByteTokenizer())
    assert [row["input_ids"].tolist() for row in corpus.training] == [[98, 98], [256, 0xC3], [0xA4, 256]]
    assert corpus.training[1]["labels"].tolist() == [256, 0xC3]
    read = corpus.read[0]
    assert (read.tokens, read.left_over, dict(corpus.validation)) == (6, 0, {})
    assert corpus.describe().endswith("6 tokens, 3 sequences")


def test_validation_sequences_are_spread_and_not_trained_on(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(range(32, 112)) * 5)
    section = DataSection(files=str(tmp_path), sequence_length=4, validation_fraction=0.1)
    corpus = read_corpus(section, ByteTokenizer())
    whole = read_corpus(DataSection(files=str(tmp_path), sequence_length=4), ByteTokenizer())
    training, validation, rows = (
        [tuple(row["input_ids"].tolist()) for row in each]
        for each in (corpus.training, corpus.validation["data.files"], whole.training)
    )
    assert (len(training), len(validation)) == (90, 10)
    assert sorted(training + validation) == sorted(rows)
    assert [rows.index(row) % 20 for row in validation] == [5, 15] * 5  # the text repeats after 20 sequences


def test_too_little_text_is_named(folder: Path) -> None:
    with pytest.raises(JobFileError, match="6 tokens are fewer than one sequence of 64"):
        read_corpus(DataSection(files=str(folder), sequence_length=64), ByteTokenizer())
    with pytest.raises(
        JobFileError, match=r"0.01 of 3 sequences of data.files leaves none to train on or none to validate"
    ):
        read_corpus(DataSection(files=str(folder), sequence_length=2, validation_fraction=0.01), ByteTokenizer())


def _tokenizer_file(path: Path, *special: str) -> Path:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    words = ["[UNK]", "hello", "world", *special]
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(path / "tokenizer.json"))
    return path / "tokenizer.json"


def test_a_tokenizer_file_is_used(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(_tokenizer_file(tmp_path, "</s>")))
    assert (tokenizer.vocab_size, tokenizer.end) == (4, 3)
    assert tokenizer.encode([Example("world hello there")])[0].ids.tolist() == [2, 1, 0, 3]
    assert load_tokenizer(str(tmp_path), "hello").end == 1


def test_bad_tokenizers_are_named(tmp_path: Path) -> None:
    with pytest.raises(JobFileError, match=r"there is no file byte\. Write bytes, .* Did you mean 'bytes'\?"):
        load_tokenizer("byte")
    with pytest.raises(JobFileError, match="it has none of the usual ones"):
        load_tokenizer(str(_tokenizer_file(tmp_path)))
    with pytest.raises(JobFileError, match=r"has no token '<eoss>'. Did you mean '<eos>'\?"):
        load_tokenizer(str(_tokenizer_file(tmp_path, "<eos>")), "<eoss>")
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(JobFileError, match=r"is not a tokenizer\.json"):
        load_tokenizer(str(tmp_path))
    with pytest.raises(JobFileError, match="the bytes tokenizer has its own"):
        load_tokenizer("bytes", "</s>")
    with pytest.raises(JobFileError, match=r"data\.chat_template: bytes have no tokens for turns"):
        load_tokenizer("bytes", chat_template="mine.jinja")


def test_a_letter_that_was_edited_anywhere_gives_other_sequences(tmp_path: Path) -> None:
    """By the checksum of all tokens: of 500 sequences 64 are compared one by one."""
    text, found = "a" * 8000, set()
    for place in (0, *range(5, 100, 16)):
        (tmp_path / "a.txt").write_text(text[:place] + "b" + text[place + 1 :], encoding="utf-8")
        data = DataSection(files=str(tmp_path / "a.txt"), tokenizer="bytes", sequence_length=16)
        found.add(read_corpus(data, ByteTokenizer()).fingerprint({"tokens": None}))
    assert len(found) == 7
