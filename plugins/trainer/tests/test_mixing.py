"""Several sources in one training: how often each is drawn, and that a resumed run draws on."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from veomni_trainer.data.orders import WeightedOrder

Train = Callable[..., bool]
Losses = Callable[[Path], list[tuple[int, float]]]


def test_sources_are_drawn_by_weight_and_start_again() -> None:
    order = WeightedOrder([10, 30], [3.0, 1.0], draws=8000, seed=0)
    drawn = list(order)
    assert len(order) == len(drawn) == 8000
    first = [index for index in drawn if index < 10]
    assert len(first) == pytest.approx(6000, rel=0.03)
    assert order.passes() == [600, pytest.approx(66.7, abs=0.1)]
    for start in range(0, len(first) - 10, 10):  # each pass has every sequence once
        assert sorted(first[start : start + 10]) == [*range(10)]
    assert len({tuple(first[start : start + 10]) for start in range(0, 500, 10)}) > 40  # in another order
    assert {*drawn} == {*range(40)}
    assert max(Counter(index for index in drawn if index >= 10).values()) <= 2000 // 30 + 10


def test_the_order_is_that_of_the_seed_and_only_goes_on() -> None:
    order = WeightedOrder([5, 7], [1.0, 1.0], draws=100, seed=3)
    assert list(order) == list(order) == list(islice(WeightedOrder([5, 7], [1.0, 1.0], 9000, 3), 100))
    assert list(order) != list(WeightedOrder([5, 7], [1.0, 1.0], draws=100, seed=4))


@pytest.fixture
def mixed_data(job_data: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """Two sources, the second of them smaller than what is drawn of it; a file to validate on."""
    (tmp_path / "few.txt").write_text("0123456789" * 20, encoding="utf-8")
    del job_data["data"]["files"]
    job_data["data"] |= {
        "sources": [{"files": "text/a.txt"}, {"files": "few.txt", "weight": 2}],
        "validation_files": "text/b.txt",
    }
    job_data["train"] |= {"steps": 8, "save_every": 3, "keep_checkpoints": 9}
    return job_data


@pytest.mark.thorough
def test_a_mixed_job_resumes_exactly_and_says_what_it_read(
    mixed_data: dict[str, Any], train: Train, losses: Losses, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(mixed_data)
    whole = losses(run)
    printed = capsys.readouterr().out
    assert "data.sources.1.files: 1 files; 201 tokens, 6 sequences, 9 tokens left over; weight 2, 1.8 epochs" in printed
    read = json.loads((run / "data.json").read_text())
    assert [source["key"] for source in read] == [
        "data.sources.0.files",
        "data.sources.1.files",
        "data.validation_files",
    ]
    assert [source["validation"] for source in read] == [0, 0, 84]
    for step in (6, 8):
        shutil.rmtree(run / f"checkpoint-{step}")
    train(mixed_data, resume=True)
    assert losses(run) == whole


@pytest.mark.thorough
def test_held_out_sequences_are_of_each_source_and_validated_apart(
    mixed_data: dict[str, Any], train: Train, run: Path
) -> None:
    del mixed_data["data"]["validation_files"]
    train(mixed_data, "data.validation_fraction=0.2", "train.steps=1")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (row,) = (row for row in rows if "validation_loss" in row)
    each = [row[f"validation_loss of data.sources.{number}.files"] for number in range(2)]
    assert min(each) < row["validation_loss"] < max(each)
    assert [source["validation"] for source in json.loads((run / "data.json").read_text())] == [17, 1]
