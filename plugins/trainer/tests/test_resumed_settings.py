"""What a changed key does to a run that is resumed: it is applied, compared, without effect, or refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from trained_runs import STEPS, TrainedRun

from veomni_core.errors import CheckpointError, ConfigError
from veomni_trainer.job.problems import known_paths
from veomni_trainer.job.resuming import REFUSED, WITHOUT_EFFECT
from veomni_trainer.job.schema import Job


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> TrainedRun:
    torch.set_num_threads(1)
    return TrainedRun.train(tmp_path_factory.mktemp("whole"))


@pytest.fixture
def run(whole: TrainedRun, tmp_path: Path) -> TrainedRun:
    return whole.copied(tmp_path / "copy")


SECOND = Path("checkpoint-2")
_MAY_CHANGE_OF_TRAIN = (
    "output_dir steps epochs learning_rate schedule schedule_options early_stop warmup weight_decay max_grad_norm dpo "
    "kto orpo grpo rloo reward parity parity_limit device gradient_checkpointing torch_compile cuda_graphs verify "
    "shadow frozen log_every validate_every save_every keep_checkpoints on_bad_loss export push_to expert_loads "
    "profile report_to sp_overlap parallel_plan timeout batch_size gradient_accumulation sp_size cp_size fsdp_size "
    "tp_size ep_size"
)
# Keys, or sections, whose other value is applied: a new key of a job is one of these, or src says why it is refused.
MAY_CHANGE = {
    *["data", "lora", "model.config", "model.resize_embeddings", "model.modeling", "model.ops_implementation"],
    *("model.trust_remote_code", WITHOUT_EFFECT),
    *(f"train.{key}" for key in _MAY_CHANGE_OF_TRAIN.split()),
}


def _rows(run: TrainedRun) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def _losses(run: TrainedRun) -> list[float]:
    return [row["loss"] for row in _rows(run)]


def _weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    return dict(load_file(checkpoint / "model.safetensors"))


def test_every_key_of_a_job_says_what_a_change_does() -> None:
    paths = {path for path in known_paths(Job) if path.count(".") == 1}
    aliases, keys = {"model.config_path", "model.path"}, {*MAY_CHANGE, *REFUSED}
    assert {path for path in paths - aliases if path not in keys and path.split(".")[0] not in keys} == set()
    assert keys <= {*paths, "data", "lora"}
    assert not MAY_CHANGE & {*REFUSED}


def test_a_lower_rate_is_in_force_from_the_next_step_on(
    run: TrainedRun, whole: TrainedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run.go("train.learning_rate=1e-30", "train.weight_decay=0.0", resume=SECOND)
    printed = capsys.readouterr().out
    assert "changed since: train.learning_rate: 0.001 -> 1e-30" in printed
    assert "in force from step 3 on: learning rate 7.5e-31 (highest 1e-30, cosine over 6 steps), weight_decay 0.0," in (
        printed
    )
    before, after = _weights(run.checkpoint(2)), _weights(run.checkpoint(STEPS))
    assert all(torch.equal(weight, after[name]) for name, weight in before.items())
    assert _losses(run)[:3] == _losses(whole)[:3]  # the third is that of the weights before its step
    assert all(kept != old for kept, old in zip(_losses(run)[3:], _losses(whole)[3:], strict=True))


@pytest.mark.thorough
def test_weight_decay_is_in_force_from_the_next_step_on(run: TrainedRun, whole: TrainedRun) -> None:
    run.go("train.weight_decay=300", resume=SECOND)
    name = "model.layers.0.mlp.up_proj.weight"
    decayed, usual = (_weights(each.checkpoint(STEPS))[name].norm() for each in (run, whole))
    assert decayed < 0.7 * usual
    assert _losses(run)[3:] != _losses(whole)[3:]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("changes", "rate"),
    [
        (["train.schedule=constant"], lambda step: 1e-3),
        (["train.schedule=linear"], lambda step: 1e-3 * (STEPS - step) / STEPS),
        (["train.schedule=linear", "train.steps=8"], lambda step: 1e-3 * (8 - step) / 8),
        (["train.schedule=constant", "train.warmup=5"], lambda step: 1e-3 * min(step / 5, 1)),
        (["train.steps=8"], lambda step: 1e-3 * (1 + math.cos(math.pi * step / 8)) / 2),
        (["train.learning_rate=2e-2", "train.schedule=constant"], lambda step: 2e-2),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_the_schedule_is_the_new_job_s_at_this_step(run: TrainedRun, changes: list[str], rate: Any) -> None:
    run.go(*changes, resume=SECOND)
    resumed = _rows(run)[2:]
    assert [row["learning_rate"] for row in resumed] == pytest.approx([rate(row["step"] - 1) for row in resumed])


def test_a_run_whose_job_is_the_same_goes_on_exactly(run: TrainedRun, whole: TrainedRun) -> None:
    run.go(resume=SECOND)
    assert _losses(run) == _losses(whole)
    assert (run.folder / "checkpoint-4.superseded").is_dir()  # set aside, not lost
    assert run.checkpoint(4).is_dir()


def test_when_to_log_and_to_save_is_the_new_job_s(run: TrainedRun) -> None:
    run.go("train.log_every=3", "train.save_every=end", resume=SECOND)
    assert [row["step"] for row in _rows(run)] == [1, 2, 3, 6]
    assert not run.checkpoint(4).exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("train.seed=1", r"train\.seed: 0 -> 1 \(another seed draws another order of sequences"),
        ("train.optimizer=sgd", r"train\.optimizer: adamw_torch_fused -> sgd \(the optimizer's state is of its kind"),
    ],
)
def test_what_a_run_cannot_go_on_with_is_refused(run: TrainedRun, change: str, message: str) -> None:
    before = run.files()
    with pytest.raises(ConfigError, match=message) as caught:
        run.go(change, resume=SECOND)
    assert f"model.weights: {run.checkpoint(2)}" in str(caught.value)
    assert run.files() == before


@pytest.mark.parametrize("change", ["data.sequence_length=16", "data.validation_fraction=0.1"])
def test_other_sequences_are_refused(run: TrainedRun, change: str) -> None:
    before = run.files()
    with pytest.raises(CheckpointError, match="was trained on other sequences than this job's"):
        run.go(change, resume=SECOND)
    assert run.files() == before


@pytest.mark.thorough
def test_a_text_that_was_edited_is_refused_and_one_that_moved_is_not(run: TrainedRun, whole: TrainedRun) -> None:
    text = run.root / "text.txt"
    text.rename(run.root / "moved.txt")
    run.go("data.files=moved.txt", resume=SECOND)
    assert _losses(run) == _losses(whole)
    (run.root / "moved.txt").write_text("a" + (run.root / "moved.txt").read_text(encoding="utf-8"), encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"\(84 then, 84 now\)"):
        run.go("data.files=moved.txt", resume=SECOND)


def test_as_many_sequences_per_step_are_the_same_run_otherwise_it_is_refused(
    run: TrainedRun, whole: TrainedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.go("train.batch_size=1", "train.gradient_accumulation=2", resume=SECOND)
    assert _losses(run) == pytest.approx(_losses(whole), rel=1e-5)
    with pytest.raises(CheckpointError, match="was trained with 2 sequences per step .* and this job takes 4"):
        run.go("train.batch_size=4", resume=SECOND)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(CheckpointError, match="was trained with 2 sequences per step .* and this job takes 4"):
        run.go(resume=SECOND)


def test_weights_of_the_job_are_not_those_that_a_run_goes_on_with(
    run: TrainedRun, whole: TrainedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    there = whole.checkpoint(6)
    run.go(f"model.config={there}", f"model.weights={there}", resume=SECOND)
    assert "changed since, without effect: model.weights: not there -> " in capsys.readouterr().out
    assert _losses(run) == _losses(whole)
