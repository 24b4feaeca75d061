"""Jobs with ``train.shadow``: kernels beside their modules' own code in the first steps, on one process and on two."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forked_processes import veomni_on_ranks
from veomni_core.errors import BindingError, ConformanceError, JobFileError

SITE = "model.layers.1.post_attention_layernorm"


@pytest.fixture
def shadowed(moe_data: dict[str, Any]) -> dict[str, Any]:
    moe_data["model"]["ops_implementation"] = {"preset": "auto"}
    moe_data["train"]["shadow"] = 2
    return moe_data


@pytest.fixture
def planted(shadowed: dict[str, Any], plant: Callable[[], None]) -> dict[str, Any]:
    """The job with a wrong kernel at one site."""
    plant()
    asked = {SITE: "planted", "default": "torch"}
    shadowed["model"]["ops_implementation"] = {"preset": "auto", "rms_norm_implementation": asked}
    return shadowed


@pytest.mark.thorough
def test_a_right_job_trains_as_without_and_says_what_was_compared(
    shadowed: dict[str, Any],
    train: Callable[..., bool],
    run: Path,
    losses: Callable[[Path], list[tuple[int, float]]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    shadowed["train"]["expert_loads"] = True
    train(shadowed)
    said = " ".join(capsys.readouterr().out.split())
    assert "equal to their own code until step 2: " in said
    assert "rms_norm/standard:torch at 9 sites" in said
    assert "moe_experts/standard:grouped_mm at 2 sites" in said
    rows = (run / "expert_rows.jsonl").read_text(encoding="utf-8")
    found = losses(run)
    train(shadowed, "train.shadow=0", overwrite=True)
    assert losses(run) == found
    assert (run / "expert_rows.jsonl").read_text(encoding="utf-8") == rows
    assert "equal to their own code" not in capsys.readouterr().out


@pytest.mark.thorough
@pytest.mark.parametrize(
    "changes",
    [
        ["train.precision=bf16_mixed"],
        ["train.gradient_checkpointing=true"],
        ["data.packing=true"],
        ["data.validation_fraction=0.2", "train.validate_every=1"],
    ],
    ids=["autocast", "checkpointing", "packing", "validation"],
)
def test_other_jobs_train_as_without_too(
    changes: list[str],
    shadowed: dict[str, Any],
    train: Callable[..., bool],
    run: Path,
    losses: Callable[[Path], list[tuple[int, float]]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    train(shadowed, *changes)
    said = " ".join(capsys.readouterr().out.split())
    assert "cross_entropy_loss/causal:chunk_loss at 1 sites" in said and "not compared" not in said
    found = losses(run)
    train(shadowed, *changes, "train.shadow=0", overwrite=True)
    assert losses(run) == found


@pytest.mark.thorough
def test_an_adapter_is_trained_as_without_too(
    lora_data: dict[str, Any],
    train: Callable[..., bool],
    run: Path,
    losses: Callable[[Path], list[tuple[int, float]]],
) -> None:
    lora_data["model"]["ops_implementation"] = {"preset": "auto"}
    train(lora_data, "train.shadow=2")
    found = losses(run)
    train(lora_data, overwrite=True)
    assert losses(run) == found


def test_a_job_whose_kernel_differs_ends_before_the_weights_change(
    planted: dict[str, Any], train: Callable[..., bool], run: Path
) -> None:
    with pytest.raises(ConformanceError, match=f"step 1: .*\n  {SITE}: rms_norm/standard:planted: the result is off"):
        train(planted)
    assert not run.exists()
    train(planted, "train.shadow=0")  # without, nothing tells
    assert (run / "metrics.jsonl").exists()


@pytest.mark.thorough
def test_two_processes_end_alike(planted: dict[str, Any], write_job: Callable[..., Path], run: Path) -> None:
    ranks = veomni_on_ranks("train", write_job(planted), processes=2)
    assert [each.returncode for each in ranks] == [1, 1]
    for each in ranks:
        said = " ".join(each.stderr.split())
        assert "error: step 1: kernels differ from their modules' own code" in said
        for rank in range(2):
            assert f"rank {rank}: {SITE}: rms_norm/standard:planted: the result is off" in said
    assert not run.exists()


@pytest.mark.parametrize("change", ["train.torch_compile=true", "train.fsdp=true", "train.sp_size=2"])
def test_what_can_t_be_looked_into_is_refused(
    shadowed: dict[str, Any], train: Callable[..., bool], change: str
) -> None:
    with pytest.raises(JobFileError, match=r"train\.shadow runs modules' own code on their inputs"):
        train(shadowed, change)


def test_an_eager_job_has_nothing_beside(job_data: dict[str, Any], train: Callable[..., bool]) -> None:
    job_data["train"]["shadow"] = 1
    with pytest.raises(BindingError, match="every site is eager"):
        train(job_data)
