"""Runs that are continued: exactly, from complete checkpoints alone, and with the same kernels."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from veomni_core import KernelSpec
from veomni_core.errors import CheckpointError, ConfigError, HostError, PlanMismatchError
from veomni_trainer.run import checkpoints

Train = Callable[..., bool]
Losses = Callable[[Path], list[tuple[int, float]]]


@pytest.mark.thorough(one_per=[])
@pytest.mark.parametrize("step", [2, 3])
def test_a_resumed_run_goes_on_exactly(
    moe_data: dict[str, Any], train: Train, losses: Losses, run: Path, step: int
) -> None:
    train(moe_data, f"train.save_every={step}", "train.keep_checkpoints=9")
    whole = losses(run)
    for path in run.glob("checkpoint-*"):
        if int(path.name.removeprefix("checkpoint-")) > step:
            shutil.rmtree(path)
    train(moe_data, f"train.save_every={step}", resume=True)
    assert losses(run) == whole


@pytest.mark.thorough
def test_an_epoch_that_ends_in_between_is_resumed_exactly(
    job_data: dict[str, Any], train: Train, losses: Losses, run: Path
) -> None:
    changes = ["train.batch_size=50", "train.steps=7", "train.save_every=5", "train.keep_checkpoints=9"]
    train(job_data, *changes)
    whole = losses(run)
    shutil.rmtree(run / "checkpoint-7")
    train(job_data, *changes, resume=True)
    assert losses(run) == whole


@pytest.mark.thorough
def test_a_run_that_is_complete_says_so(
    job_data: dict[str, Any], train: Train, losses: Losses, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(job_data)
    train(job_data, resume=True)
    assert "is complete: it stands at step 4 of 4. Raise train.steps to go on." in capsys.readouterr().out
    train(job_data, "train.steps=6", resume=True)
    assert "changed since: train.steps: 4 -> 6" in capsys.readouterr().out
    assert len(losses(run)) == 6
    with pytest.raises(ConfigError, match=r"train\.steps is 3, but .*checkpoint-6 is already past that"):
        train(job_data, "train.steps=3", resume=True)


def test_another_plan_needs_consent(moe_data: dict[str, Any], train: Train, losses: Losses, run: Path) -> None:
    train(moe_data, "train.steps=3")
    plan = json.loads((run / "checkpoint-3" / "plan.json").read_text())
    norms = next(op for op in plan["ops"] if op["op_name"] == "rms_norm")
    norms["sites"][0]["kernel"] = "liger_kernel"
    spec = KernelSpec(
        "liger_kernel", "rms_norm", norms["sites"][0]["site"]["variant"], "veomni_liger.rms_norm:rms_norm"
    )
    plan["kernels"].append({"spec": asdict(spec), "distribution": "veomni-liger", "version": "0.1.0"})
    (run / "checkpoint-3" / "plan.json").write_text(json.dumps(plan))
    before = (run / "metrics.jsonl").read_text()
    with pytest.raises(PlanMismatchError) as caught:
        train(moe_data, resume=True)
    assert "rms_norm: liger_kernel -> eager at 1 site(s)" in str(caught.value)
    assert "--accept-plan-change" in str(caught.value)
    assert (run / "metrics.jsonl").read_text() == before
    train(moe_data, resume=True, accept_plan_change=True)
    assert [step for step, _ in losses(run)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.thorough
def test_a_checkpoint_that_does_not_fit_is_refused(moe_data: dict[str, Any], train: Train, run: Path) -> None:
    train(moe_data, "train.steps=2", "train.warmup=1")
    with pytest.raises(CheckpointError, match="checkpoint-2 does not fit this model: "):
        train(moe_data, "model.config.num_key_value_heads=2", resume=True)
    with pytest.raises(CheckpointError, match=r"missing keys: model\.layers\.2"):
        train(moe_data, "model.config.num_hidden_layers=3", resume=True)


def test_a_checkpoint_that_is_not_finished_does_not_appear(
    job_data: dict[str, Any], train: Train, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(checkpoints, "publish_folder", full_disk)
    with pytest.raises(HostError, match="disk full"):
        train(job_data)
    assert not [*run.glob("checkpoint-*"), *run.glob(".incomplete")]
    with pytest.raises(CheckpointError, match="there is nothing to resume"):
        train(job_data, resume=True)
