"""Jobs of several processes under torchrun: they train, save, resume and validate as one process does."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from veomni_trainer.run import run_job

pytestmark = pytest.mark.slow

ALONE = [sys.executable, "-m", "veomni_core.cli"]
TWO = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "veomni_core.cli"]

_SECONDS = 120

WriteJob = Callable[[dict[str, Any]], Path]
Losses = Callable[[Path], list[tuple[int, float]]]
Curve = dict[str, list[float]]


def _veomni(command: list[str], *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """What it printed and returned; where it hangs, a failure that shows where each of its processes stands."""
    whole = [*command, *map(str, arguments)]
    with subprocess.Popen(
        whole,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"},
    ) as process:
        try:
            printed, errors = process.communicate(timeout=_SECONDS)
        except subprocess.TimeoutExpired:
            _end(process)
            printed, errors = process.communicate()
            pytest.fail(f"still running after {_SECONDS} s\n{printed}\n{errors}")
    return subprocess.CompletedProcess(whole, process.returncode, printed, errors)


def _end(process: subprocess.Popen[str]) -> None:
    """torchrun starts its workers in sessions of their own; aborted, each of all these prints its stack."""
    for each in (*psutil.Process(process.pid).children(recursive=True), process):
        with contextlib.suppress(psutil.NoSuchProcess):  # it may end by itself meanwhile
            each.send_signal(signal.SIGABRT)


def _train(command: list[str], job: Path, run: Path, *changes: str) -> tuple[Curve, str]:
    """What the run's metrics say of losses and gradients, and what was printed."""
    sets = [part for change in (*changes, f"train.output_dir={run}") for part in ("--set", change)]
    result = _veomni(command, "train", job, *sets)
    assert result.returncode == 0, result.stderr
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    keys = ("loss", "aux_loss", "grad_norm", "validation_loss")
    return {key: [row[key] for row in rows if key in row] for key in keys}, result.stdout


def _assert_same(found: Curve, wanted: Curve) -> None:
    for key, values in wanted.items():
        assert found[key] == pytest.approx(values, rel=1e-5), key


@pytest.fixture
def balanced_moe_data(job_data: dict[str, Any], qwen3_moe: dict[str, Any]) -> dict[str, Any]:
    """A mixture of experts whose load-balancing loss is a part of the loss that shows."""
    config = {**qwen3_moe, "router_aux_loss_coef": 0.5}
    return {**job_data, "model": {**job_data["model"], "config": config}}


def test_two_processes_train_save_and_resume_as_one_job(
    job_data: dict[str, Any], write_job: WriteJob, losses: Losses, tmp_path: Path
) -> None:
    job_data["data"]["validation_fraction"] = 0.03  # five sequences in batches of two: one process has no second batch
    job_data["train"] |= {"steps": 4, "save_every": 2}
    job, run = write_job(job_data), tmp_path / "run"
    found, printed = _train(TWO, job, run)
    assert printed.count("step 4/4  loss") == 1
    alone, _ = _train(ALONE, job, tmp_path / "single", "train.batch_size=4")
    assert len(alone["loss"]) == 4
    _assert_same(found, alone)
    whole = losses(run)
    (run / "checkpoint-4" / "plan.json").unlink()  # it is incomplete now, and passed over
    resumed = _veomni(TWO, "train", job, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert losses(run) == whole


def test_two_processes_balance_experts_as_one(
    balanced_moe_data: dict[str, Any], write_job: WriteJob, tmp_path: Path
) -> None:
    job = write_job(balanced_moe_data)
    found, _ = _train(TWO, job, tmp_path / "run")
    # One process takes the same batches one after the other, and adds the load-balancing loss for each.
    alone, _ = _train(
        ALONE,
        job,
        tmp_path / "single",
        "train.gradient_accumulation=2",
        "model.config.router_aux_loss_coef=0.25",
    )
    assert len(alone["aux_loss"]) == 4
    _assert_same(found, alone)


@pytest.mark.parametrize("is_moe", [False, True], ids=["dense", "moe"])
def test_two_processes_that_share_each_sequence_train_as_one(
    job_data: dict[str, Any], balanced_moe_data: dict[str, Any], write_job: WriteJob, tmp_path: Path, is_moe: bool
) -> None:
    data = balanced_moe_data if is_moe else job_data
    data["model"]["ops_implementation"] = {"preset": "eager", "attn_implementation": "sdpa"}
    data["data"]["validation_fraction"] = 0.1  # seventeen sequences, and batches of two
    data["train"] |= {"steps": 6, "gradient_accumulation": 2}
    job = write_job(data)
    shared, printed = _train(TWO, job, tmp_path / "run", "train.sp_size=2")
    assert "In force: sequence parallelism: Ulysses, sp=2, over sdpa" in printed
    alone, _ = _train(ALONE, job, tmp_path / "single")
    assert (len(alone["loss"]), len(alone["aux_loss"]), len(alone["validation_loss"])) == (6, 6 * is_moe, 1)
    _assert_same(shared, alone)


def test_a_model_whose_sequences_cannot_be_shared_is_refused_before_its_weights_are_read(
    job_data: dict[str, Any], write_job: WriteJob, tmp_path: Path
) -> None:
    job_data["model"]["weights"] = "nowhere"
    job_data["model"]["config"] |= {"num_attention_heads": 1}
    result = _veomni(TWO, "train", write_job(job_data), "--set", "train.sp_size=2")
    assert result.returncode == 1
    assert "error: LlamaForCausalLM can't run sequence-parallel over 2 ranks: its attention is eager" in result.stderr
    assert "2 does not divide 1 query heads" in result.stderr
    assert "nowhere" not in result.stderr
    assert not (tmp_path / "run").exists()


def test_the_model_is_gone_before_the_process_group_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """DDP's reducer, were it the last that holds the group, could wait for gloo's thread forever."""
    model = torch.nn.Linear(1, 1)
    model.in_a_cycle = [model]
    remains, here = weakref.ref(model), []
    monkeypatch.setattr(run_job.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(run_job.distributed, "destroy_process_group", lambda: here.append(remains()))
    del model
    run_job._let_go()
    assert here == [None]
