"""Jobs that can't run: they say why, and leave what is there as it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from veomni_core.errors import (
    CheckpointError,
    ConfigError,
    HostError,
    JobFileError,
    MissingOpsImplementationError,
    UnknownNameError,
)

Train = Callable[..., bool]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ("model.config.model_type=lama", UnknownNameError, "model_type 'lama' is unknown. Did you mean 'llama'?"),
        ("model.config.hiden_size=3", UnknownNameError, "llama has no such key. Did you mean 'hidden_size'?"),
        ("model.config.num_layers=3", UnknownNameError, "llama has no such key. Did you mean 'num_hidden_layers'?"),
        ("model.config.vocab_size=200", ConfigError, "vocab_size is 200, but data.tokenizer has 257 tokens"),
        ("data.sequence_length=65", ConfigError, "65, but the model's max_position_embeddings is 64"),
        ("data.sequence_length=6000", ConfigError, "max_position_embeddings is 64; lower data.sequence_length"),
        ("train.batch_size=1000", JobFileError, "168 sequences for training, and one step takes 1,000"),
        ("train.device=cuda", HostError, "train.device is cuda, but torch sees no CUDA device here"),
        ("train.fsdp=true", HostError, "torchrun --nproc_per_node=N -m veomni_core.cli train JOB.yaml"),
        ("train.sp_size=2", HostError, "train.sp_size is 2, and this job has 1 process(es). Start a multiple of 2"),
        ("train.sp_size=3", JobFileError, "3 processes can't share data.sequence_length 32 equally"),
        ("train.cp_size=2", HostError, "train.cp_size is 2, and this job has 1 process(es). Start a multiple of 2"),
        (
            "train.cp_size=32",
            JobFileError,
            "32 processes can't share data.sequence_length 32 equally; write a multiple",
        ),
        ("model.ops_implementation=null", MissingOpsImplementationError, "model.ops_implementation is missing"),
        (
            "model.ops_implementation.rms_norm_implementatoin=eager",
            UnknownNameError,
            "Did you mean 'rms_norm_implementation'?",
        ),
        ("model.weights=nowhere", CheckpointError, "nowhere: expected a folder with *.safetensors files"),
    ],
)
def test_a_job_that_cannot_run_says_why_and_writes_nothing(
    job_data: dict[str, Any], train: Train, run: Path, change: str, error: type[Exception], message: str
) -> None:
    if "cuda" in change:
        torch = pytest.importorskip("torch")
        if torch.cuda.is_available():
            pytest.skip("there is a CUDA device here")
    with pytest.raises(error) as caught:
        train(job_data, change)
    assert message in str(caught.value)
    assert not run.exists()


def test_too_few_processes_are_refused_before_weights_are_read(
    job_data: dict[str, Any], train: Train, run: Path
) -> None:
    job_data["model"]["weights"] = "nowhere"
    with pytest.raises(HostError, match=r"train\.sp_size is 2, and this job has 1 process"):
        train(job_data, "train.sp_size=2")
    assert not run.exists()


def test_sharding_on_cpus_is_refused_and_not_ignored(
    job_data: dict[str, Any], train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(HostError, match="accelerate would replicate the model"):
        train(job_data, "train.fsdp=true")


def test_compare_is_one_process_s_business(
    job_data: dict[str, Any], train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="Run the job twice"):
        train(job_data, compare="eager")


@pytest.mark.thorough
def test_a_start_that_fails_leaves_earlier_results_alone(
    job_data: dict[str, Any], train: Train, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(job_data)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match="holds an earlier run"):
        train(job_data)

    def explode(*_: Any, **__: Any) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr("transformers.Trainer.training_step", explode)
    with pytest.raises(RuntimeError, match="no memory"):
        train(job_data, overwrite=True)
    with pytest.raises(RuntimeError, match="no memory"):
        train(job_data, "train.steps=9", resume=True)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    with pytest.raises(RuntimeError, match="no memory"):
        train(job_data, f"train.output_dir={run}-new")
    assert not run.with_name("run-new").exists()


def test_float16_on_a_cpu_is_refused(job_data: dict[str, Any], train: Train, run: Path) -> None:
    with pytest.raises(HostError, match=r"accelerate scales losses on accelerators only.*bf16_mixed or float32"):
        train(job_data, "train.precision=fp16_mixed")
    assert not run.exists()


def test_cuda_graphs_are_refused_where_there_is_no_nvidia_gpu_and_beside_other_processes(
    job_data: dict[str, Any], train: Train, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_data["train"] |= {"device": "auto", "cuda_graphs": True}
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(HostError, match=r"train\.cuda_graphs needs an NVIDIA GPU.*write cuda_graphs: false"):
        train(job_data)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(HostError, match=r"train\.cuda_graphs is for one process, and this job has several"):
        train(job_data)
    assert not run.exists()
