"""Packed rows with media learn what the same rows learn one by one, or are refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_equals_transformers_on_media import chats_of, write_rows
from tiny_processors import media_folder, needs_torchvision

from veomni_core.errors import ConfigError
from veomni_trainer.job.load import load_job
from veomni_trainer.run.dry_run import dry_run

Train = Callable[..., bool]
APART = ("llava", "qwen2_audio", "internvl", "qwen2_5_vl", "qwen3_vl")


@pytest.fixture
def rows(job_data: dict[str, Any], tmp_path: Path) -> Callable[[str], dict[str, Any]]:
    """Makes a job on rows with media for a tiny model of a type."""

    def make(model_type: str) -> dict[str, Any]:
        kind = "audio" if model_type == "qwen2_audio" else "image"
        if kind == "audio":
            pytest.importorskip("soundfile")
            pytest.importorskip("soxr")
        write_rows(chats_of(kind), kind, tmp_path)
        folder = media_folder(model_type, tmp_path / "base")
        job_data["model"] = {"weights": str(folder), "ops_implementation": {"preset": "auto"}}
        job_data["data"] = {"files": "rows.jsonl", "sequence_length": 200}
        job_data["train"] |= {"steps": 12, "batch_size": 10, "save_every": "never"}
        return job_data

    return make


def curve(run: Path) -> list[tuple[float, float]]:
    """The loss and the norm of the gradient of each step."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [(row["loss"], row["grad_norm"]) for row in map(json.loads, lines)]


@pytest.mark.parametrize("method", ["pretrain", pytest.param("sft", marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    "model_type",
    [needs_torchvision(each, marks=[] if each == "llava" else [pytest.mark.thorough]) for each in APART],
)
def test_packed_rows_are_learned_as_each_alone(
    rows: Any, train: Train, run: Path, write_job: Any, model_type: str, method: str
) -> None:
    data = rows(model_type)
    data["train"]["method"] = method
    train(data)  # each step has all ten rows
    alone = curve(run)
    data["data"]["packing"] = True
    packs = dry_run(load_job(write_job(data), ["train.batch_size=1"]), overwrite=True).corpus.sequences
    assert packs in (2, 3)
    train(data, f"train.batch_size={packs}", overwrite=True)
    assert alone[-1][0] < alone[0][0]
    for found, expected in zip(curve(run), alone, strict=True):
        assert found == pytest.approx(expected, rel=1e-4)


@pytest.mark.thorough
def test_a_family_that_looks_for_images_elsewhere_in_a_packed_row_is_refused(rows: Any, train: Train) -> None:
    """transformers' mask of packed sequences asks by position which image a token of Gemma 3 belongs to."""
    data = rows("gemma3")
    data["data"]["packing"] = True
    with pytest.raises(
        ConfigError, match=r"data\.packing: Gemma3\w+ can't keep packed documents with media apart\. The"
    ):
        train(data, "train.batch_size=1")
