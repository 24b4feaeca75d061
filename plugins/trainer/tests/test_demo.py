"""The demo, which pretrains on the sources of Python's standard library: a few of its steps, as its user runs them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from veomni_trainer.job.load import load_job
from veomni_trainer.run.run_job import run_job

DEMO = Path(__file__).parents[3] / "examples" / "demo.yaml"
if not DEMO.exists():
    pytest.skip("the examples lie in the repository", allow_module_level=True)


def test_it_learns_on_its_kernels_and_reports_its_curves(tmp_path: Path) -> None:
    few = ("train.steps=12", "train.warmup=2", "data.sequence_length=64", "train.batch_size=4")
    run_job(load_job(DEMO, [*few, f"train.output_dir={tmp_path}/run"]))
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text("utf-8").splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert len(losses) == 12 and losses[-1] < losses[0] - 0.3
    receipt = json.loads((tmp_path / "run/receipt.json").read_text("utf-8"))
    ops = {kernel["kernel"].split("/")[0] for kernel in receipt["kernels"]}
    assert {"moe_experts", "rms_norm", "cross_entropy_loss"} <= ops
    report = (tmp_path / "run/report.html").read_text("utf-8")
    assert [title for title in ("Loss", "Router loss", "Gradient norm") if f">{title}<" not in report] == []
