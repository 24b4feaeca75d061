"""How long a job trains: steps or epochs, and an early stop."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from veomni_core.errors import ConfigError, JobFileError
from veomni_trainer.job.load import load_job, parse_job
from veomni_trainer.run.dry_run import dry_run

Train = Callable[..., bool]
Losses = Callable[[Path], list[tuple[int, float]]]


def test_a_job_needs_a_length(job_data: dict[str, Any]) -> None:
    del job_data["train"]["steps"]
    with pytest.raises(JobFileError, match="train: needs either steps or epochs"):
        parse_job(job_data)


def test_a_warm_up_as_long_as_the_epochs_is_refused_by_train_and_dry_run(
    job_data: dict[str, Any], write_job: Callable[[dict[str, Any]], Path], train: Train, run: Path
) -> None:
    del job_data["train"]["steps"]
    job_data["train"] |= {"epochs": 1, "batch_size": 84, "warmup": 2}
    words = r"train\.warmup: 2 is as long as the training or longer, and train\.epochs gives 2 steps in all"
    with pytest.raises(JobFileError, match=words):
        train(job_data)
    with pytest.raises(JobFileError, match=words):
        dry_run(load_job(write_job(job_data)))
    assert not run.exists()


@pytest.mark.thorough
def test_epochs_pass_over_the_sequences(
    job_data: dict[str, Any], train: Train, losses: Losses, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    del job_data["train"]["steps"]
    job_data["train"] |= {"epochs": 1.5, "batch_size": 50, "gradient_accumulation": 2, "warmup": 0.3}
    train(job_data)  # 168 sequences: 3 batches, so 2 steps, an epoch
    assert [step for step, _ in losses(run)] == [1, 2, 3]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["learning_rate"] for row in rows[:2]] == [0.0, 1e-3]
    assert "step 3/3" in capsys.readouterr().out
    train(job_data, resume=True)
    assert "is complete: it stands at step 3 of 3. Raise train.epochs to go on." in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"train\.epochs is 0\.5, but .*checkpoint-3 is already past that"):
        train(job_data, "train.epochs=0.5", resume=True)


@pytest.mark.thorough
def test_training_stops_where_validation_no_longer_improves_and_a_resumed_one_at_the_same_step(
    job_data: dict[str, Any], train: Train, losses: Losses, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job_data["data"]["validation_fraction"] = 0.05
    job_data["train"] |= {
        **{"steps": 20, "validate_every": 2, "save_every": 4, "keep_checkpoints": 9, "learning_rate": 1e-9},
        "early_stop": {"patience": 3, "min_improvement": 0.01},
    }
    train(job_data)
    whole = losses(run)
    assert whole[-1][0] == 8  # the first validation is the best, and three more are no better
    assert sorted(path.name for path in run.glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-8"]
    train(job_data, resume=True)
    assert "it stopped early at step 8. Raise train.early_stop.patience to go on." in capsys.readouterr().out
    shutil.rmtree(run / "checkpoint-8")
    train(job_data, resume=True)
    assert losses(run) == whole
