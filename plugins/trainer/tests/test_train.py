"""Whole runs of tiny models: what they write, and what their rows depend on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from veomni_core import Hardware
from veomni_core.errors import PlanMismatchError
from veomni_trainer.job.load import load_job
from veomni_trainer.output.folder import RunFolder
from veomni_trainer.run.checkpoints import StartingPoint
from veomni_trainer.run.start import prepare
from veomni_trainer.setup.arguments import may_leave_parameters_unused
from veomni_trainer.setup.conditions import for_this_machine
from veomni_transformers.forwards.head_call import HeadCall

Train = Callable[..., bool]
Losses = Callable[[Path], list[tuple[int, float]]]


@pytest.mark.thorough
def test_float32_weights_train_under_autocast_with_the_kernels_planned_for_it(
    moe_data: dict[str, Any], train: Train, run: Path, losses: Losses, caplog: pytest.LogCaptureFixture
) -> None:
    moe_data["model"]["ops_implementation"] = {"preset": "auto"}
    assert train(moe_data, "train.precision=bf16_mixed") is False
    receipt = json.loads((run / "receipt.json").read_text(encoding="utf-8"))
    assert receipt["autocast"] == "bfloat16" and not receipt["changed"]
    assert "does not run what was bound" not in caplog.text
    assert losses(run)[-1][1] < losses(run)[0][1]
    with pytest.raises(PlanMismatchError, match="autocast: bfloat16 -> off"):
        train(moe_data, "train.precision=float32", "train.steps=8", resume=True)


def test_a_fused_loss_computes_no_logits_in_mixed_precision(
    job_data: dict[str, Any], train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """accelerate casts what the model's forward returned to float32, after every step."""
    computed: list[Any] = []
    eager = HeadCall.compute_logits
    monkeypatch.setattr(HeadCall, "compute_logits", lambda call: (computed.append(call), eager(call))[1])
    job_data["model"]["ops_implementation"] = {"cross_entropy_loss_implementation": "chunk_loss"}
    train(job_data, "train.precision=bf16_mixed")
    assert not computed


def test_a_job_for_the_cpu_gets_the_cpu_s_plan_beside_a_gpu(
    job_data: dict[str, Any], train: Train, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Hardware("cuda", 90, "NVIDIA H200", detected=True)
    monkeypatch.setattr(Hardware, "detect", classmethod(lambda kind: here))
    job_data["model"]["ops_implementation"] = {"preset": "auto"}
    train(job_data)
    assert json.loads((run / "plan.json").read_text(encoding="utf-8"))["hardware"]["device_type"] == "cpu"


def test_a_run_writes_everything_it_should(
    moe_data: dict[str, Any], train: Train, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moe_data["data"]["validation_fraction"] = 0.1
    assert train(moe_data, "train.save_every=2") is False
    assert sorted(path.name for path in run.iterdir()) == [
        "checkpoint-4",
        "checkpoint-6",
        "data.json",
        "job.yaml",
        "metrics.jsonl",
        "plan.json",
        "receipt.json",
        "report.html",
        "summary.json",
    ]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6, 6]
    assert set(rows[0]) == {
        "step",
        "loss",
        "aux_loss",
        "grad_norm",
        "learning_rate",
        "step_seconds",
        "tokens_per_second",
        "learned_tokens",
        "peak_memory_bytes",
    }
    assert rows[0]["learning_rate"] == 0.0
    assert rows[2]["learning_rate"] == 1e-3
    assert rows[5]["loss"] < rows[0]["loss"]
    assert "validation_loss" in rows[6]
    assert (run / "plan.json").read_text() == (run / "checkpoint-6" / "plan.json").read_text()
    printed = capsys.readouterr().out
    assert printed.index("Bound on cpu") < printed.index("step 1/6") < printed.index("step 6/6")
    assert f"report: {run / 'report.html'}" in printed


@pytest.mark.thorough
def test_validation_takes_every_sequence(job_data: dict[str, Any], train: Train, run: Path) -> None:
    job_data["data"]["validation_fraction"] = 0.02  # three sequences, and batches of two
    values = []
    for batch_size in (2, 3, 8):
        train(job_data, "train.learning_rate=1e-9", f"train.batch_size={batch_size}", overwrite=True)
        values += [json.loads((run / "summary.json").read_text())["run"]["validation_loss"]]
    assert values == pytest.approx([values[0]] * 3, rel=1e-5)


def test_validation_and_checkpoints_come_when_they_are_asked_for(
    job_data: dict[str, Any], train: Train, run: Path
) -> None:
    job_data["data"]["validation_fraction"] = 0.02
    train(job_data, "train.steps=5", "train.validate_every=2", "train.save_every=3", "train.keep_checkpoints=9")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["step"] for row in rows if "validation_loss" in row] == [2, 4, 5]
    assert sorted(path.name for path in run.glob("checkpoint-*")) == ["checkpoint-3", "checkpoint-5"]


@pytest.mark.thorough
def test_rows_do_not_depend_on_how_often_they_are_written(
    job_data: dict[str, Any], train: Train, losses: Losses, run: Path
) -> None:
    train(job_data, "train.steps=5")
    every = dict(losses(run))
    train(job_data, "train.steps=5", "train.log_every=2", overwrite=True)
    assert losses(run) == [(step, every[step]) for step in (2, 4, 5)]


@pytest.mark.thorough
def test_gradient_checkpointing_changes_nothing(
    job_data: dict[str, Any], train: Train, losses: Losses, run: Path
) -> None:
    train(job_data)
    plain = losses(run)
    train(job_data, "train.gradient_checkpointing=true", overwrite=True)
    assert losses(run) == plain


@pytest.mark.thorough
def test_a_saved_model_can_be_trained_on_by_its_path(
    job_data: dict[str, Any], train: Train, losses: Losses, run: Path, tmp_path: Path
) -> None:
    train(job_data)
    job_data["model"] |= {"config": None, "weights": str(run / "checkpoint-4")}
    train(job_data, f"train.output_dir={tmp_path / 'more'}")
    assert losses(tmp_path / "more")[0][1] < losses(run)[0][1]


@pytest.mark.thorough
def test_kernels_are_verified_before_the_first_step_where_the_job_says_so(
    job_data: dict[str, Any], train: Train, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch_norms = "model.ops_implementation.rms_norm_implementation=torch"
    train(job_data, torch_norms, "train.verify=true")
    assert "verified: rms_norm/standard:torch" in capsys.readouterr().out
    assert json.loads((run / "receipt.json").read_text(encoding="utf-8"))["verified"]


@pytest.mark.parametrize(("model", "looks"), [("job_data", False), ("moe_data", True)])
def test_ddp_looks_for_unused_parameters_only_where_there_may_be_some(
    request: pytest.FixtureRequest, write_job: Any, run: Path, model: str, looks: bool
) -> None:
    job = for_this_machine(load_job(write_job(request.getfixturevalue(model))))
    start = prepare(job, RunFolder(run), StartingPoint(), accept_plan_change=False)
    assert start.arguments.ddp_find_unused_parameters is looks
    checkpointed = job.train.model_copy(update={"gradient_checkpointing": True})
    assert not may_leave_parameters_unused(start.model, start.binding.plan, checkpointed)
