"""Small jobs that train in a second, and the ways to run them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tiny_configs import LLAMA, QWEN3_MOE

TEXT = "the quick brown fox jumps over the lazy dog; " * 60


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def qwen3_moe() -> dict[str, Any]:
    """The config of a tiny mixture of experts: its checkpoints store experts otherwise than the model holds them."""
    return deepcopy(QWEN3_MOE)


@pytest.fixture
def job_data(tmp_path: Path) -> dict[str, Any]:
    """A whole job: a tiny Llama on two small files."""
    text = tmp_path / "text"
    text.mkdir()
    (text / "a.txt").write_text(TEXT, encoding="utf-8")
    (text / "b.txt").write_text(TEXT.upper(), encoding="utf-8")
    return {
        "model": {"config": deepcopy(LLAMA), "dtype": "float32", "ops_implementation": {"preset": "eager"}},
        "data": {"files": "text", "sequence_length": 32},
        "train": {
            "output_dir": str(tmp_path / "run"),
            "steps": 4,
            "batch_size": 2,
            "learning_rate": 1e-3,
            "device": "cpu",
        },
    }


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The output folder of the job."""
    return tmp_path / "run"


@pytest.fixture
def moe_data(job_data: dict[str, Any], qwen3_moe: dict[str, Any]) -> dict[str, Any]:
    """The same job with a tiny mixture of experts, accumulating gradients."""
    job_data["model"]["config"] = qwen3_moe
    job_data["train"] |= {"steps": 6, "gradient_accumulation": 2, "warmup": 2}
    return job_data


@pytest.fixture
def write_job(tmp_path: Path) -> Callable[[dict[str, Any]], Path]:
    """Writes a job's YAML beside its data."""

    def write(data: dict[str, Any]) -> Path:
        path = tmp_path / "job.yaml"
        path.write_text(yaml.safe_dump(data), encoding="utf-8")
        return path

    return write


@pytest.fixture
def train(write_job: Callable[[dict[str, Any]], Path]) -> Callable[..., bool]:
    """Runs a job in this process; returns whether it was interrupted."""
    from veomni_trainer.job.load import load_job
    from veomni_trainer.run.run_job import run_job

    def train_job(data: dict[str, Any], *changes: str, **options: Any) -> bool:
        return run_job(load_job(write_job(data), changes), **options)

    return train_job


@pytest.fixture
def losses() -> Callable[[Path], list[tuple[int, float]]]:
    """Step and loss of every training row in a run's metrics."""

    def read(run: Path) -> list[tuple[int, float]]:
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        return [(row["step"], row["loss"]) for row in rows if "loss" in row]

    return read
