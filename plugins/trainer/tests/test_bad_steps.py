"""Losses and gradients that are not finite: training stops there or warns, and no good checkpoint is lost."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from transformers import TrainerControl, TrainerState, TrainingArguments

from veomni_core.errors import TrainingDivergedError
from veomni_trainer.job.train_section import TrainSection
from veomni_trainer.loop import early_ends
from veomni_trainer.loop.early_ends import BadSteps

Train = Callable[..., bool]
DIVERGES = "train.learning_rate=1e38"  # the first step makes weights of 1e38, and the second a loss of NaN


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON")


def _strict(text: str) -> Any:
    return json.loads(text, parse_constant=_no_number)


def _rows(run: Path) -> list[dict[str, Any]]:
    return [_strict(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.mark.thorough(one_per=[])
@pytest.mark.parametrize("log_every", [1, 10])
def test_training_stops_at_the_first_bad_step_and_keeps_the_last_good_checkpoint(
    job_data: dict[str, Any], train: Train, run: Path, log_every: int
) -> None:
    job_data["data"]["validation_fraction"] = 0.1
    every_step = ("train.save_every=1", "train.keep_checkpoints=1", "train.validate_every=1", "train.export=true")
    with pytest.raises(TrainingDivergedError) as caught:
        train(job_data, DIVERGES, *every_step, f"train.log_every={log_every}")
    assert str(caught.value) == (
        "step 2: the loss is nan. Training stopped there, and no checkpoint was written of it. The last checkpoint is "
        f"{run / 'checkpoint-1'}. Go on from it with other settings, such as --resume --set train.learning_rate=1e+37, "
        "or let training pass such steps with train.on_bad_loss: warn"
    )
    assert [path.name for path in run.glob("checkpoint-*")] == ["checkpoint-1"]
    assert not (run / "model").exists()
    last = _rows(run)[-1]
    assert (last["step"], last["loss"], last["bad"]) == (2, None, "the loss is nan")
    summary = _strict((run / "summary.json").read_text(encoding="utf-8"))
    assert summary["run"]["last_loss"] is None and summary["run"]["first_bad_step"] == "step 2: the loss is nan"
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "This job has 1 bad step. The first one is step 2: the loss is nan." in page


@pytest.mark.thorough
def test_a_run_that_stopped_goes_on_with_other_settings(
    job_data: dict[str, Any], train: Train, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BadSteps, "_find", lambda self, _: "the loss is inf" if _worse(self) else "")
    with pytest.raises(TrainingDivergedError, match="step 3: the loss is inf"):
        train(job_data, "train.save_every=1", "train.learning_rate=1e-3")
    monkeypatch.undo()
    train(job_data, "train.learning_rate=1e-4", resume=True)
    assert [row["step"] for row in _rows(run)] == [1, 2, 3, 4]
    assert not any("bad" in row for row in _rows(run))
    assert "bad step" not in (run / "report.html").read_text(encoding="utf-8")


def _worse(steps: BadSteps) -> bool:
    steps.count = getattr(steps, "count", 0) + 1
    return steps.count == 3


@pytest.mark.thorough
def test_a_warning_lets_training_pass_and_writes_no_bad_checkpoint(
    job_data: dict[str, Any], train: Train, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(TrainingDivergedError, match=r"step 4: the loss is nan\. It is the last step, and no ch"):
        train(job_data, DIVERGES, "train.on_bad_loss=warn", "train.save_every=1", "train.keep_checkpoints=1")
    assert capsys.readouterr().out.count("warning: step 2: the loss is nan. No checkpoint is written of such a st") == 1
    assert [(row["step"], "bad" in row) for row in _rows(run)] == [(1, False), (2, True), (3, True), (4, True)]
    assert [path.name for path in run.glob("checkpoint-*")] == ["checkpoint-1"]


@pytest.mark.thorough
def test_a_warned_run_that_recovers_is_a_success(
    job_data: dict[str, Any], train: Train, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BadSteps, "_find", lambda self, _: "the gradient norm is inf" if _worse(self) else "")
    assert train(job_data, "train.on_bad_loss=warn", "train.save_every=1", "train.keep_checkpoints=9") is False
    assert sorted(path.name for path in run.glob("checkpoint-*")) == [f"checkpoint-{step}" for step in (1, 2, 4)]
    assert _strict((run / "summary.json").read_text(encoding="utf-8"))["run"]["bad_steps"] == 1


class _Step:
    """One step of a job, as the callback sees it."""

    def __init__(self, tmp_path: Path, scale: tuple[float | None, float | None] = (None, None)) -> None:
        train = TrainSection.model_validate({"output_dir": "run", "steps": 9})
        scales = iter(scale)  # before the step, and after it
        self.steps = BadSteps(train, lambda: next(scales))
        self.steps.start_step()
        self.arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")

    def end(self, loss: float, norm: float) -> TrainerControl:
        control = TrainerControl(should_save=True)
        self.steps.look_at_loss(torch.tensor(loss))
        self.steps.look_at_norm(torch.tensor(norm))
        self.steps.on_step_end(self.arguments, TrainerState(global_step=5), control)
        return control


@pytest.mark.parametrize(
    ("loss", "norm", "problem"),
    [
        (1.0, 2.0, ""),
        (float("inf"), 2.0, "the loss is inf"),
        (1.0, float("nan"), "the gradient norm is nan"),
        (1.0, float("inf"), "the gradient norm is inf"),
    ],
)
def test_losses_and_norms_are_looked_at(tmp_path: Path, loss: float, norm: float, problem: str) -> None:
    step = _Step(tmp_path)
    control = step.end(loss, norm)
    assert step.steps.problem == problem
    assert (control.should_training_stop, control.should_save) == (bool(problem), not problem)


def test_a_step_that_a_loss_scaler_left_out_is_not_bad(tmp_path: Path) -> None:
    assert not _Step(tmp_path, (65536.0, 32768.0)).end(1.0, float("inf")).should_training_stop
    assert _Step(tmp_path, (65536.0, 32768.0)).end(float("nan"), float("inf")).should_training_stop
    assert _Step(tmp_path, (65536.0, 65536.0)).end(1.0, float("inf")).should_training_stop
    assert _Step(tmp_path, (65536.0, 131072.0)).end(1.0, float("nan")).should_training_stop  # it grows after good steps


def test_a_rank_stops_for_the_loss_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = _Step(tmp_path)
    monkeypatch.setattr(TrainingArguments, "world_size", 2)

    def all_reduce(values: torch.Tensor) -> None:
        values += torch.tensor([float("nan"), 1.0])  # what the other rank has

    monkeypatch.setattr(early_ends.distributed, "all_reduce", all_reduce)
    assert step.end(1.0, 1.0).should_training_stop
    assert step.steps.problem == "the loss is nan"
