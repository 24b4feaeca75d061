"""What only a GPU can train: loss scaling, autocast over the kernels that a GPU gets, and quantized weights."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from veomni_core.errors import ConfigError
from veomni_trainer.output.export import export_checkpoint

Train = Callable[..., bool]
Losses = Callable[[Path], list[tuple[int, float]]]
STEPS = 24

pytestmark = pytest.mark.gpu

# Wide enough for the kernels of a GPU: heads of 64, products of multiples of 8.
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture
def job(job_data: dict[str, Any]) -> dict[str, Any]:
    """A job on the GPU with the kernels that `auto` chooses there."""
    job_data["model"]["config"] |= WIDE
    job_data["model"]["ops_implementation"] = {"preset": "auto"}
    job_data["train"] |= {"device": "cuda", "steps": STEPS, "learning_rate": 1e-3, "schedule": "constant"}
    job_data["train"]["save_every"] = STEPS // 2
    return job_data


@pytest.mark.parametrize(
    ("precision", "allowed"), [("float32", 1e-3), ("bf16_mixed", 0.02), ("fp16_mixed", 0.02), ("bf16", 0.1)]
)
def test_a_precision_learns_what_float32_learns_and_resumes(
    job: dict[str, Any], train: Train, losses: Losses, run: Path, precision: str, allowed: float
) -> None:
    train(job, "train.precision=float32", "model.ops_implementation.preset=eager", "train.save_every=never")
    exact = dict(losses(run))
    train(job, f"train.precision={precision}", overwrite=True)
    found = dict(losses(run))
    receipt = json.loads((run / "receipt.json").read_text(encoding="utf-8"))
    assert any(op["bound"] for op in receipt["ops"])
    assert found[STEPS] < 0.9 * found[1]
    assert found == pytest.approx(exact, rel=allowed)

    train(job, f"train.precision={precision}", f"train.steps={STEPS // 2}", overwrite=True)
    assert (run / f"checkpoint-{STEPS // 2}" / "scaler.pt").is_file() == (precision == "fp16_mixed")
    train(job, f"train.precision={precision}", resume=True)
    # Sums of a GPU's atomic additions differ in their last bits from run to run.
    assert dict(losses(run)) == pytest.approx(found, rel=allowed / 2)


def test_steps_that_overflow_in_float16_are_left_out_and_training_goes_on(
    job: dict[str, Any], train: Train, losses: Losses, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = torch.amp.GradScaler.__init__

    def large(self: Any, *args: Any, **kwargs: Any) -> None:
        start(self, *args, **kwargs | {"init_scale": 2.0**40})  # overflows until it has been halved often enough

    monkeypatch.setattr(torch.amp.GradScaler, "__init__", large)
    assert train(job, "train.precision=fp16_mixed", "train.steps=60") is False
    values = [loss for _, loss in losses(run)]
    assert values[0] == pytest.approx(values[1], rel=0.05) and values[-1] < 0.9 * values[0]
    assert all(map(math.isfinite, values))


@pytest.mark.parametrize(
    "changes",
    [
        ("train.precision=float32",),
        ("train.precision=float32", "train.gradient_accumulation=2"),
        ("train.precision=float32", "train.gradient_checkpointing=true"),
        ("train.precision=bf16",),
        ("train.precision=bf16_mixed", "train.gradient_accumulation=2", "train.gradient_checkpointing=true"),
    ],
    ids=["float32", "accumulated", "checkpointed", "bf16", "bf16_mixed"],
)
@pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])
def test_steps_as_cuda_graphs_learn_what_steps_without_learn(
    job: dict[str, Any],
    qwen3_moe: dict[str, Any],
    train: Train,
    losses: Losses,
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: tuple[str, ...],
    experts: bool,
) -> None:
    if experts:
        job["model"]["config"] = qwen3_moe | WIDE | {"moe_intermediate_size": 256}
    # Liger's, which `auto` takes where it is installed, asks the GPU how many labels are learned.
    job["model"]["ops_implementation"]["cross_entropy_loss_implementation"] = ["quack", "chunk_loss"]
    job["train"]["save_every"] = "never"
    train(job, *changes)
    wanted = dict(losses(run))
    replays = []
    replay = torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: (replays.append(graph), replay(graph)))
    train(job, *changes, "train.cuda_graphs=true", overwrite=True)
    assert len(replays) >= STEPS - 3
    # Sums of a GPU's atomic additions differ in their last bits from run to run.
    assert dict(losses(run)) == pytest.approx(wanted, rel=1e-3 if changes[0].endswith("float32") else 2e-2)


def test_dropout_in_a_checkpointed_cuda_graph_is_refused(job: dict[str, Any], train: Train) -> None:
    job["model"]["config"]["attention_dropout"] = 0.1
    job["model"]["ops_implementation"] = {"preset": "eager"}
    with pytest.raises(ConfigError, match="the model draws random numbers"):
        train(job, "train.gradient_checkpointing=true", "train.cuda_graphs=true")


def test_quantized_weights_are_trained_over_validated_and_merged(
    lora_data: dict[str, Any], train: Train, losses: Losses, run: Path
) -> None:
    pytest.importorskip("bitsandbytes")
    lora_data["lora"]["quantization"] = "nf4"
    lora_data["model"]["ops_implementation"] = {"preset": "auto"}
    lora_data["data"]["validation_fraction"] = 0.1
    lora_data["train"] |= {"device": "cuda", "steps": STEPS}
    train(lora_data)
    values = [loss for _, loss in losses(run)]
    assert all(map(math.isfinite, values)) and values[-1] < values[0]
    export_checkpoint(run / f"checkpoint-{STEPS}", run / "merged", merges_adapter=True)
    merged = AutoModelForCausalLM.from_pretrained(run / "merged")
    assert merged.dtype == torch.float32 and not getattr(merged, "is_quantized", False)
