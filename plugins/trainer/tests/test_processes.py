"""Jobs of several processes under torchrun: they train, save, resume and validate as one process does."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_equals_transformers_on_media import chats_of, write_rows
from tiny_processors import media_folder, needs_torchvision

from forked_processes import veomni, veomni_on_ranks
from veomni_trainer.run import run_job

WriteJob = Callable[[dict[str, Any]], Path]
Losses = Callable[[Path], list[tuple[int, float]]]
Curve = dict[str, list[float]]
# How processes share sequences: what the receipt says, how many they are, and the job's keys.
SHARED = {
    "Ulysses, sp=2": (2, ["train.sp_size=2"]),
    "ring, cp=2": (2, ["train.cp_size=2"]),
    "ring, cp=2, Ulysses, sp=2": (4, ["train.cp_size=2", "train.sp_size=2"]),
}


def _on_two(*arguments: str | Path, processes: int = 2) -> subprocess.CompletedProcess[str]:
    """Run the command on several processes; gives their highest exit code, and what all have printed."""
    ranks = veomni_on_ranks(*arguments, processes=processes)
    printed, errors = ("".join(getattr(each, name) for each in ranks) for name in ("stdout", "stderr"))
    return subprocess.CompletedProcess(arguments, max(each.returncode for each in ranks), printed, errors)


def _by_torchrun(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command = [*torchrun, "-m", "veomni_core.cli", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )


def _train(
    command: Callable[..., subprocess.CompletedProcess[str]], job: Path, run: Path, *changes: str
) -> tuple[Curve, str]:
    """What the run's metrics say of losses and gradients, and what was printed."""
    sets = [part for change in (*changes, f"train.output_dir={run}") for part in ("--set", change)]
    result = command("train", job, *sets)
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


@pytest.mark.thorough
def test_two_processes_train_save_and_resume_as_one_job(
    job_data: dict[str, Any], write_job: WriteJob, losses: Losses, tmp_path: Path
) -> None:
    job_data["data"]["validation_fraction"] = 0.03  # five sequences in batches of two: one process has no second batch
    job_data["train"] |= {"steps": 4, "save_every": 2}
    job, run = write_job(job_data), tmp_path / "run"
    found, printed = _train(_by_torchrun, job, run)
    assert printed.count("step 4/4  loss") == 1
    alone, _ = _train(veomni, job, tmp_path / "single", "train.batch_size=4")
    assert len(alone["loss"]) == 4
    _assert_same(found, alone)
    whole = losses(run)
    (run / "checkpoint-4" / "plan.json").unlink()  # it is incomplete now, and passed over
    resumed = _on_two("train", job, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert losses(run) == whole


def test_two_processes_stop_at_the_same_bad_step_and_write_the_report(
    job_data: dict[str, Any], write_job: WriteJob, tmp_path: Path
) -> None:
    job_data["train"] |= {"learning_rate": 1e38, "save_every": 1, "keep_checkpoints": 1}
    result = _on_two("train", write_job(job_data))
    assert result.returncode == 1
    assert result.stderr.count("error: step 2: the loss is nan. Training stopped there") == 1
    assert "The first one is step 2" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-1"]


@pytest.mark.thorough
def test_two_processes_balance_experts_as_one(
    balanced_moe_data: dict[str, Any], write_job: WriteJob, tmp_path: Path
) -> None:
    job = write_job(balanced_moe_data)
    found, _ = _train(_on_two, job, tmp_path / "run")
    # One process takes the same batches one after the other.
    alone, _ = _train(veomni, job, tmp_path / "single", "train.gradient_accumulation=2")
    assert len(alone["aux_loss"]) == 4
    _assert_same(found, alone)


@pytest.mark.thorough
def test_two_processes_train_an_adapter_as_one(lora_data: dict[str, Any], write_job: WriteJob, tmp_path: Path) -> None:
    job = write_job(lora_data)
    found, _ = _train(_on_two, job, tmp_path / "run", "train.export=merged")
    alone, _ = _train(veomni, job, tmp_path / "single", "train.batch_size=4")
    _assert_same(found, alone)
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()


@pytest.mark.thorough
@pytest.mark.parametrize("way", SHARED)
@pytest.mark.parametrize("is_moe", [False, True], ids=["dense", "moe"])
def test_processes_that_share_each_sequence_train_as_one(
    job_data: dict[str, Any],
    balanced_moe_data: dict[str, Any],
    write_job: WriteJob,
    tmp_path: Path,
    is_moe: bool,
    way: str,
) -> None:
    data = balanced_moe_data if is_moe else job_data
    data["model"]["ops_implementation"] = {"preset": "eager", "attn_implementation": "sdpa"}
    data["data"]["validation_fraction"] = 0.1  # seventeen sequences, and batches of two
    data["train"] |= {"steps": 6, "gradient_accumulation": 2}
    job = write_job(data)
    processes, changes = SHARED[way]
    shared, printed = _train(functools.partial(_on_two, processes=processes), job, tmp_path / "run", *changes)
    assert f"In force: sequence parallelism: {way}, over sdpa" in printed
    alone, _ = _train(veomni, job, tmp_path / "single")
    assert (len(alone["loss"]), len(alone["aux_loss"]), len(alone["validation_loss"])) == (6, 6 * is_moe, 1)
    _assert_same(shared, alone)


@pytest.mark.thorough
@pytest.mark.parametrize("way", SHARED)
def test_processes_that_share_packed_sequences_of_a_hybrid_train_as_one(
    job_data: dict[str, Any], write_job: WriteJob, tmp_path: Path, way: str
) -> None:
    mixers = {
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 3,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    }
    layers = {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2}
    job_data["model"] = {
        "config": {**job_data["model"]["config"], "model_type": "qwen3_5_text", "head_dim": 8, **layers, **mixers},
        "ops_implementation": {"preset": "auto", "attn_implementation": "sdpa"},
    }
    job_data["data"]["packing"] = True
    job = write_job(job_data)
    processes, changes = SHARED[way]
    shared, printed = _train(functools.partial(_on_two, processes=processes), job, tmp_path / "run", *changes)
    assert f"In force: sequence parallelism: {way}, over sdpa" in printed
    alone, _ = _train(veomni, job, tmp_path / "single")
    assert len(alone["loss"]) == 4
    _assert_same(shared, alone)


@pytest.mark.thorough
@pytest.mark.parametrize("model_type", [needs_torchvision("qwen3_vl"), needs_torchvision("gemma3")])
def test_two_processes_share_sequences_with_pictures(
    job_data: dict[str, Any], write_job: WriteJob, tmp_path: Path, model_type: str
) -> None:
    write_rows(chats_of("image"), "image", tmp_path)
    folder = media_folder(model_type, tmp_path / "base")
    job_data["model"] = {"weights": str(folder), "ops_implementation": {"preset": "auto"}}
    job_data["data"] = {"files": "rows.jsonl", "sequence_length": 200}
    job_data["train"] |= {"steps": 6, "batch_size": 3, "gradient_accumulation": 2, "save_every": "never"}
    job = write_job(job_data)
    shared, printed = _train(_on_two, job, tmp_path / "run", "train.sp_size=2")
    assert "In force: sequence parallelism: Ulysses, sp=2, over sdpa" in printed
    alone, _ = _train(veomni, job, tmp_path / "single")
    _assert_same(shared, alone)
    changes = ("train.sp_size=2", "train.sp_overlap=true", "train.fsdp_size=2")
    sharded, printed = _train(_on_two, job, tmp_path / "fsdp", *changes)
    assert "Ulysses, sp=2, over sdpa, overlapping with projections" in printed
    _assert_same(sharded, alone)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        *((model_type, ()) for model_type in ("llava", "mllama", "qwen2_audio")),
        *((model_type, ("train.fsdp_size=2",)) for model_type in ("gemma3", "mllama", "qwen2_audio")),
    ],
)
def test_two_processes_of_which_one_has_a_row_of_text_alone_train_as_one(
    job_data: dict[str, Any], write_job: WriteJob, tmp_path: Path, model_type: str, changes: tuple[str, ...]
) -> None:
    kind = "audio" if model_type == "qwen2_audio" else "image"
    write_rows([row for number, row in enumerate(chats_of(kind)) if number != 6], kind, tmp_path)  # Mllama takes one
    folder = media_folder(model_type, tmp_path / "base")
    job_data["model"] = {"weights": str(folder), "ops_implementation": {"preset": "auto"}}
    job_data["data"] = {"files": "rows.jsonl", "sequence_length": 200}
    job_data["train"] |= {"batch_size": 1, "save_every": "never", "max_grad_norm": 0.5}
    job_data["train"]["method"] = "sft" if kind == "audio" else "pretrain"  # its own loss is a micro-batch's mean
    if changes and kind == "audio":  # transformers trains its frozen positions, but not where it shards the model
        job_data["train"]["learning_rate"] = 1e-9
    job = write_job(job_data)
    found, _ = _train(_on_two, job, tmp_path / "run", *changes)
    alone, _ = _train(veomni, job, tmp_path / "single", "train.gradient_accumulation=2")
    _assert_same(found, alone)


def test_a_model_whose_sequences_cannot_be_shared_is_refused_before_its_weights_are_read(
    job_data: dict[str, Any], write_job: WriteJob, tmp_path: Path
) -> None:
    job_data["model"]["weights"] = "nowhere"
    job_data["model"]["config"] |= {"num_attention_heads": 1}
    result = _on_two("train", write_job(job_data), "--set", "train.sp_size=2")
    assert result.returncode == 2
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
