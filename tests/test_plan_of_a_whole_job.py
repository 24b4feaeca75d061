"""What ``veomni plan`` makes of a whole job: its device and precision, what it could not check, and what it assumes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from veomni_core import Hardware
from veomni_core.cli.app import build_app
from whole_jobs import JOB, changed


@pytest.fixture
def planned(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """The plan of a job as JSON, on a machine that has a GPU."""
    monkeypatch.chdir(folder)
    here = Hardware("cuda", 90, "NVIDIA H200", detected=True)
    monkeypatch.setattr(Hardware, "detect", classmethod(lambda kind: here))

    def plan(job: dict[str, Any], *options: str) -> dict[str, Any]:
        path = folder / "beside" / "job.yaml"
        path.write_text(yaml.safe_dump(job), encoding="utf-8")
        return json.loads(CliRunner().invoke(build_app(), ["plan", str(path), "--json", *options]).stdout)

    return plan


def test_plan_goes_by_the_job_s_device_and_precision(planned):
    changes = ("--set", "train.precision=bf16_mixed", "--set", "train.device=auto")
    assert planned(JOB, *changes)["autocast"] == "bfloat16"
    assert planned(changed(train__precision="bf16_mixed"))["autocast"] == "bfloat16"
    assert planned(JOB)["autocast"] is None
    assert planned(JOB)["hardware"]["device_type"] == "cpu"
    on_gpu = planned(changed(train__device="auto"))
    assert (on_gpu["hardware"]["device_type"], on_gpu["autocast"]) == ("cuda", "bfloat16")
    assert planned(changed(train__device="auto", train__precision="float32"))["autocast"] is None
    assert planned(changed(train__device="auto", train__precision="fp16_mixed"))["autocast"] == "float16"
    named = planned(JOB, "--hardware", "h200")
    assert (named["hardware"]["device_type"], named["autocast"]) == ("cuda", "bfloat16")
    assert planned(JOB, "--hardware", "t4")["autocast"] is None  # bfloat16 is only emulated there


def test_without_a_plugin_that_runs_jobs_plan_says_what_it_did_not_check(folder, monkeypatch):
    monkeypatch.setenv("VEOMNI_PLUGINS", "veomni-torch")
    path = folder / "beside" / "job.yaml"
    path.write_text(yaml.safe_dump(changed(train__steps="sixty", trian={})), encoding="utf-8")
    result = CliRunner().invoke(build_app(), ["plan", str(path)])
    assert result.exit_code == 0 and "Plan for" in result.stdout
    assert result.stderr == "not checked: data, train, trian. No installed plugin runs jobs; install veomni-trainer\n"


def test_weights_that_only_the_named_hardware_has_are_assumed_there(folder, monkeypatch):
    monkeypatch.chdir(folder)
    path = folder / "beside" / "job.yaml"
    path.write_text(yaml.safe_dump(changed(model__weights="/data/llama")), encoding="utf-8")
    result = CliRunner().invoke(build_app(), ["plan", str(path), "--hardware", "h200"])
    assert result.exit_code == 0
    assert result.stdout.endswith("since it is not this machine:\n  model.weights: /data/llama\n")
