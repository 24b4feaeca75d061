"""Whole runs of tiny models: what they write, that they resume exactly, and what stops them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from veomni_core import Hardware
from veomni_core.errors import (
    CheckpointError,
    ConfigError,
    HostError,
    JobFileError,
    MissingOpsImplementationError,
    PlanMismatchError,
    UnknownNameError,
)
from veomni_trainer.loop import checkpoints

Train = Callable[..., bool]
Losses = Callable[[Path], list[tuple[int, float]]]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def moe_data(job_data: dict[str, Any], qwen3_moe: dict[str, Any]) -> dict[str, Any]:
    """The same job with a tiny mixture of experts, accumulating gradients."""
    job_data["model"]["config"] = qwen3_moe
    job_data["train"] |= {"steps": 6, "gradient_accumulation": 2, "warmup": 2}
    return job_data


def test_float32_weights_train_under_autocast_with_the_kernels_planned_for_it(
    moe_data: dict[str, Any], train: Train, run: Path, losses: Losses, caplog: pytest.LogCaptureFixture
) -> None:
    moe_data["model"]["ops_implementation"] = {"preset": "auto"}
    assert train(moe_data, "train.bf16=true") is False
    receipt = json.loads((run / "receipt.json").read_text(encoding="utf-8"))
    assert receipt["autocast"] == "bfloat16" and not receipt["changed"]
    assert "does not run what was bound" not in caplog.text
    assert losses(run)[-1][1] < losses(run)[0][1]
    with pytest.raises(PlanMismatchError, match="autocast: bfloat16 -> off"):
        train(moe_data, "train.bf16=false", "train.steps=8", resume=True)


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


def test_an_epoch_that_ends_in_between_is_resumed_exactly(
    job_data: dict[str, Any], train: Train, losses: Losses, run: Path
) -> None:
    changes = ["train.batch_size=50", "train.steps=7", "train.save_every=5", "train.keep_checkpoints=9"]
    train(job_data, *changes)
    whole = losses(run)
    shutil.rmtree(run / "checkpoint-7")
    train(job_data, *changes, resume=True)
    assert losses(run) == whole


def test_rows_do_not_depend_on_how_often_they_are_written(
    job_data: dict[str, Any], train: Train, losses: Losses, run: Path
) -> None:
    train(job_data, "train.steps=5")
    every = dict(losses(run))
    train(job_data, "train.steps=5", "train.log_every=2", overwrite=True)
    assert losses(run) == [(step, every[step]) for step in (2, 4, 5)]


def test_gradient_checkpointing_changes_nothing(
    job_data: dict[str, Any], train: Train, losses: Losses, run: Path
) -> None:
    train(job_data)
    plain = losses(run)
    train(job_data, "train.gradient_checkpointing=true", overwrite=True)
    assert losses(run) == plain


def test_a_saved_model_can_be_trained_on_by_its_path(
    job_data: dict[str, Any], train: Train, losses: Losses, run: Path, tmp_path: Path
) -> None:
    train(job_data)
    job_data["model"] |= {"config": None, "weights": str(run / "checkpoint-4")}
    train(job_data, f"train.output_dir={tmp_path / 'more'}")
    assert losses(tmp_path / "more")[0][1] < losses(run)[0][1]


def test_another_plan_needs_consent(moe_data: dict[str, Any], train: Train, losses: Losses, run: Path) -> None:
    train(moe_data, "train.steps=3")
    plan = json.loads((run / "checkpoint-3" / "plan.json").read_text())
    norms = next(op for op in plan["ops"] if op["op_name"] == "rms_norm")
    norms["sites"][0]["kernel"] = "liger_kernel"
    (run / "checkpoint-3" / "plan.json").write_text(json.dumps(plan))
    before = (run / "metrics.jsonl").read_text()
    with pytest.raises(PlanMismatchError) as caught:
        train(moe_data, resume=True)
    assert "rms_norm: liger_kernel -> eager at 1 site(s)" in str(caught.value)
    assert "--accept-plan-change" in str(caught.value)
    assert (run / "metrics.jsonl").read_text() == before
    train(moe_data, resume=True, accept_plan_change=True)
    assert [step for step, _ in losses(run)] == [1, 2, 3, 4, 5, 6]


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


def test_a_checkpoint_that_is_not_finished_does_not_appear(
    job_data: dict[str, Any], train: Train, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(checkpoints, "publish_folder", full_disk)
    with pytest.raises(OSError, match="disk full"):
        train(job_data)
    assert not [*run.glob("checkpoint-*"), *run.glob(".incomplete")]
    with pytest.raises(CheckpointError, match="there is nothing to resume"):
        train(job_data, resume=True)


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


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ("model.config.model_type=lama", UnknownNameError, "model_type 'lama' is unknown. Did you mean 'llama'?"),
        ("model.config.hiden_size=3", UnknownNameError, "llama has no such key. Did you mean 'hidden_size'?"),
        ("model.config.vocab_size=200", ConfigError, "vocab_size is 200, but data.tokenizer has 257 tokens"),
        ("data.sequence_length=65", ConfigError, "65, but the model's max_position_embeddings is 64"),
        ("data.sequence_length=6000", JobFileError, "are fewer than one sequence of 6,000"),
        ("train.batch_size=1000", JobFileError, "168 sequences for training, and one step takes 1,000"),
        ("train.device=cuda", HostError, "train.device is cuda, but torch sees no CUDA device here"),
        ("train.fsdp=true", HostError, "torchrun --nproc_per_node=N -m veomni_core.cli train JOB.yaml"),
        ("train.sp_size=2", HostError, "train.sp_size is 2, and this job has 1 process(es). Start a multiple of 2"),
        ("train.sp_size=3", JobFileError, "3 processes can't share data.sequence_length 32 equally"),
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


def test_a_checkpoint_that_does_not_fit_is_refused(moe_data: dict[str, Any], train: Train, run: Path) -> None:
    train(moe_data, "train.steps=2")
    with pytest.raises(CheckpointError, match="checkpoint-2 does not fit this model: "):
        train(moe_data, "model.config.num_key_value_heads=2", resume=True)
    with pytest.raises(CheckpointError, match=r"missing keys: model\.layers\.2"):
        train(moe_data, "model.config.num_hidden_layers=3", resume=True)


def test_compare_is_one_process_s_business(
    job_data: dict[str, Any], train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="Run the job twice"):
        train(job_data, compare="eager")


def test_sharding_on_cpus_is_refused_and_not_ignored(
    job_data: dict[str, Any], train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(HostError, match="accelerate would replicate the model"):
        train(job_data, "train.fsdp=true")
