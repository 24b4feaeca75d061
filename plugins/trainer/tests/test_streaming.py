"""Streams: the same sequences at each start, shuffled, without an end, and resumed where they were."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from veomni_core.errors import JobFileError
from veomni_trainer.data.corpus import read_corpus
from veomni_trainer.data.streaming import Stream
from veomni_trainer.data.tokens import ByteTokenizer
from veomni_trainer.job.data_section import DataSection
from veomni_trainer.output.metrics import figures, read_metrics

Train = Callable[..., bool]
Losses = Callable[[Path], list[tuple[int, float]]]


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    """Two hundred documents of sixteen tokens, each of them another."""
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(f'{{"text": "{number:015d}"}}\n' for number in range(200)), encoding="utf-8")
    return path


def _stream(lines: Path, seed: int = 0, **keys: Any) -> Stream:
    section = DataSection(
        **{"files": str(lines), "sequence_length": 16, "streaming": True, "shuffle_buffer": 32} | keys
    )
    stream = read_corpus(section, ByteTokenizer(), seed).training
    assert isinstance(stream, Stream)
    return stream


def _numbers(stream: Stream, count: int) -> list[int]:
    return [int(bytes(row["input_ids"][:15].tolist())) for row in islice(stream, count)]


def test_a_stream_is_shuffled_by_its_seed_and_starts_again(lines: Path) -> None:
    drawn = _numbers(_stream(lines), 1000)
    assert drawn == _numbers(_stream(lines), 1000) != _numbers(_stream(lines, seed=1), 1000)
    assert drawn[:200] != sorted(drawn[:200])
    assert {*Counter(drawn).values()} <= {4, 5, 6}


def test_ranks_that_share_a_batch_get_the_same(lines: Path) -> None:
    alone, shared = _numbers(_stream(lines), 8), _numbers(_stream(lines).in_batches(2, 2), 16)
    assert shared == [number for start in range(0, 8, 2) for number in alone[start : start + 2] * 2]


def test_joined_text_goes_on_over_windows_and_passes(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"0123456789" * 200)
    stream = _stream(tmp_path / "a.txt", sequence_length=7, shuffle_buffer=1)
    tokens = [token for row in islice(stream, 1000) for token in row["input_ids"].tolist()]
    assert bytes(token for token in tokens if token != ByteTokenizer.end) == (b"0123456789" * 700)[: 7000 - 3]


def test_documents_of_a_stream_are_packed(lines: Path) -> None:
    for row in islice(_stream(lines, packing=True, sequence_length=40), 20):
        assert row["position_ids"].tolist()[:32] == [*range(16)] * 2
        assert row["labels"].tolist()[32:] == [-100] * 8


def test_sources_of_a_stream_mix_by_weight(lines: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text('{"text": "999999999999999"}\n', encoding="utf-8")
    sources = [{"files": str(lines), "weight": 3.0}, {"files": str(other)}]
    drawn = _numbers(_stream(lines, files=None, sources=sources), 1000)
    assert drawn.count(999999999999999) == pytest.approx(250, abs=40)


def test_what_a_stream_can_not_do_is_refused(lines: Path, tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="nobody knows how long a stream is"):
        _stream(lines, validation_fraction=0.1)
    with pytest.raises(ValidationError, match="shuffle_buffer is that of a stream"):
        DataSection(files="a", sequence_length=2, shuffle_buffer=8)
    with pytest.raises(JobFileError, match="there is no file or folder"):
        _stream(tmp_path / "nowhere.jsonl")


def test_a_step_of_a_stream_that_learns_nothing_is_named(
    job_data: dict[str, Any], train: Train, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": "a", "completion": "b"}] * 64 + [{"prompt": "a" * 40, "completion": "b"}] * 64
    files = tmp_path / "rows.jsonl"
    files.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    job_data["data"] |= {"files": str(files), "streaming": True, "shuffle_buffer": 1, "sequence_length": 8}
    job_data["train"] |= {"steps": 4, "batch_size": 32, "save_every": "never"}
    train(job_data)
    assert capsys.readouterr().out.count(": nothing is learned, and its loss is 0") == 1
    assert [row["learned_tokens"] > 0 for row in read_metrics(run / "metrics.jsonl")] == [True, True, False, False]
    assert figures(read_metrics(run / "metrics.jsonl"))["last_loss"] > 1


@pytest.mark.thorough
def test_a_streamed_job_resumes_exactly(
    job_data: dict[str, Any], train: Train, losses: Losses, run: Path, lines: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job_data["data"] |= {"files": str(lines), "streaming": True, "shuffle_buffer": 16, "validation_files": "text/b.txt"}
    job_data["train"] |= {"steps": 6, "save_every": 2, "keep_checkpoints": 9, "gradient_accumulation": 2}
    train(job_data)
    whole = losses(run)
    assert "data: a stream, tokenized while the model trains" in capsys.readouterr().out
    for step in (4, 6):
        shutil.rmtree(run / f"checkpoint-{step}")
    train(job_data, resume=True)
    assert losses(run) == whole
