"""Sizes over which a job can't be sharded: refused with keys and numbers, by `plan` as by `train`, before processes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from typer.testing import CliRunner

from veomni_core import Hardware
from veomni_core.cli.app import build_app
from veomni_core.errors import CheckpointError, ConfigError, HostError, JobFileError
from veomni_trainer.job.load import load_job
from veomni_trainer.run.check import check_job

Train = Callable[..., bool]
WriteJob = Callable[[dict[str, Any]], Path]

CONTRADICTIONS = {
    "experts over a part of the processes": (
        {"fsdp_size": 4, "ep_size": 3},
        "train.ep_size: 3 does not divide the 4 processes of fsdp_size 4 x tp_size 1",
    ),
    "experts of one process": ({"ep_size": 2}, "train.ep_size: 2 does not divide the 1 processes"),
    "experts along their width": (
        {"fsdp_size": 3, "tp_size": 4, "ep_size": 6},
        "train.ep_size: 6 is no multiple of tp_size 4",
    ),
    "heads twice": ({"tp_size": 2, "sp_size": 2}, "train.sp_size 2 and tp_size 2 can't be combined"),
    "a ring of divided heads": ({"tp_size": 2, "cp_size": 2}, "are not tested together"),
    "two ways to shard": ({"fsdp_size": 2, "fsdp": True}, "write train.fsdp: false, and the number of processes as"),
    "a plan for nothing": ({"parallel_plan": {"tp": {"lm_head": "colwise"}}}, "set train.fsdp_size or train.tp_size"),
    "an unknown kind of plan": (
        {"tp_size": 2, "parallel_plan": {"pp": {}}},
        "train.parallel_plan.pp: there is no such key. Known: ep, fsdp, tp.",
    ),
    "no size": ({"tp_size": 0}, "train.tp_size: must be greater than or equal to 1"),
    "loads of compiled code": ({"expert_loads": True, "torch_compile": True}, "which a compiled model doesn't call"),
    "a graph of compiled code": (
        {"cuda_graphs": True, "torch_compile": True, "shadow": 2},
        "train.cuda_graphs does not go with train.torch_compile and train.shadow and train.device: cpu; leave that out",
    ),
    "a graph of counted rows": (
        {"cuda_graphs": True, "expert_loads": True, "device": "auto"},
        "train.cuda_graphs does not go with train.expert_loads; leave that out",
    ),
    "a graph of many processes": ({"cuda_graphs": True, "fsdp_size": 2}, "does not go with several processes"),
    "a graph of scaled losses": ({"cuda_graphs": True, "precision": "fp16_mixed"}, "go with train.precision: fp16"),
    "an export of nothing": ({"export": True, "save_every": "never"}, "that needs a checkpoint"),
}


@pytest.mark.parametrize("sizes, message", CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_sizes_that_contradict_each_other_are_refused_when_the_job_is_read(
    job_data: dict[str, Any], write_job: WriteJob, sizes: dict[str, Any], message: str
) -> None:
    job_data["train"] |= sizes
    with pytest.raises(JobFileError) as caught:
        load_job(write_job(job_data))
    assert message in str(caught.value)


MISFITS = {
    "experts": ("moe_data", {"fsdp_size": 8, "ep_size": 8}, "ep_size=8 does not divide the 4 experts"),
    "heads": ("job_data", {"tp_size": 2}, "tp_size=2 does not divide the 1 key and value heads"),
    "a dense model": ("job_data", {"fsdp_size": 2, "ep_size": 2}, "`LlamaForCausalLM` has no `ep_plan`"),
    "a pattern of another model": (
        "job_data",
        {"fsdp_size": 2, "tp_size": 1, "parallel_plan": {"fsdp": {"model.blocks.*": "free_full_weight"}}},
        "keys ['model.blocks.*'] match nothing in LlamaForCausalLM",
    ),
    "an unknown style": (
        "moe_data",
        {"fsdp_size": 2, "ep_size": 2, "parallel_plan": {"ep": {"model.layers.*.mlp.experts": "scatter"}}},
        "Unsupported `ep_plan` styles: {'scatter'}",
    ),
}


@pytest.mark.parametrize("fixture, sizes, message", MISFITS.values(), ids=MISFITS)
def test_sizes_that_do_not_fit_the_model_are_refused_by_plan_and_train_alike(
    request: pytest.FixtureRequest,
    write_job: WriteJob,
    train: Train,
    run: Path,
    fixture: str,
    sizes: dict[str, Any],
    message: str,
) -> None:
    pytest.importorskip("transformers.distributed.expert_parallel")
    data = request.getfixturevalue(fixture)
    data["train"] |= sizes
    with pytest.raises(ConfigError) as planned:
        check_job(write_job(data), Hardware.cpu())
    named = (f"{key} {sizes[key]}" for key in ("fsdp_size", "tp_size", "ep_size") if key in sizes)
    assert all(each in str(planned.value) for each in (message, *named))
    with pytest.raises(ConfigError) as trained:
        train(data)
    assert str(trained.value) == str(planned.value)
    assert not run.exists()


def test_a_job_started_alone_is_refused_with_the_command(moe_data: dict[str, Any], train: Train, run: Path) -> None:
    pytest.importorskip("transformers.distributed.expert_parallel")
    with pytest.raises(HostError) as caught:
        train(moe_data, "train.fsdp_size=2", "train.ep_size=2")
    assert "need 2 processes, and this job has 1. Start it as `torchrun --nproc_per_node=2 -m" in str(caught.value)
    assert not run.exists()


def test_an_engine_that_is_too_old_is_named(
    moe_data: dict[str, Any], write_job: WriteJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers.distributed.expert_parallel", None)
    moe_data["train"]["fsdp_size"] = 2
    with pytest.raises(HostError, match=rf"5\.21 or newer; this is transformers {transformers.__version__}"):
        check_job(write_job(moe_data), Hardware.cpu())


def test_a_plan_is_made_for_the_sizes(moe_data: dict[str, Any], write_job: WriteJob) -> None:
    pytest.importorskip("transformers.distributed.expert_parallel")
    moe_data["train"] |= {"fsdp_size": 8, "ep_size": 4}
    result = CliRunner().invoke(build_app(), ["plan", str(write_job(moe_data)), "--hardware", "h200"])
    assert result.exit_code == 0 and "FSDP2 over 2, experts over 4" in " ".join(result.stdout.split())


@pytest.mark.thorough
def test_a_checkpoint_of_one_process_is_no_start_for_shards(moe_data: dict[str, Any], train: Train) -> None:
    train(moe_data, "train.steps=2", "train.warmup=1")
    with pytest.raises(CheckpointError, match=r"was not written by a sharded job.*model\.weights of a new job"):
        train(moe_data, "train.fsdp_size=2", resume=True)


def test_loads_of_a_dense_model_are_refused(job_data: dict[str, Any], train: Train, run: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.expert_loads: this model has no experts"):
        train(job_data, "train.expert_loads=true")
    assert not run.exists()
