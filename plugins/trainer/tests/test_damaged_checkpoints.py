"""Checkpoints with missing, truncated or damaged files: each is named, before training begins, and nothing is lost."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from trained_runs import STEPS, TrainedRun
from typer.testing import CliRunner

from veomni_core.cli.app import build_app
from veomni_core.errors import CheckpointError
from veomni_trainer.job.load import load_job
from veomni_trainer.output.export import export_checkpoint
from veomni_trainer.output.folder import RunFolder
from veomni_trainer.output.manifest import damage
from veomni_trainer.run.checkpoints import check_sequences, starting_point
from veomni_trainer.setup.conditions import for_this_machine

FILES = (
    "optimizer.pt",
    "scheduler.pt",
    "rng_state.pth",
    "trainer_state.json",
    "model.safetensors",
    "config.json",
    "job.yaml",
    "layout.json",
    "sequences.json",
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> TrainedRun:
    torch.set_num_threads(1)
    return TrainedRun.train(tmp_path_factory.mktemp("whole"))


@pytest.fixture
def run(whole: TrainedRun, tmp_path: Path) -> TrainedRun:
    return whole.copied(tmp_path / "copy")


def _start(run: TrainedRun, resume: bool | Path = True) -> int:
    return starting_point(for_this_machine(load_job(run.job)), RunFolder(run.folder), resume, overwrite=False).step


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.thorough(one_per=[])
@pytest.mark.parametrize("name", FILES)
def test_a_missing_and_a_truncated_file_are_named_with_the_older_checkpoint(run: TrainedRun, name: str) -> None:
    file = run.checkpoint(STEPS) / name
    size = file.stat().st_size
    _truncate(file)
    with pytest.raises(CheckpointError) as caught:
        _start(run)
    assert f"checkpoint-6 is damaged: {name} has {size // 2:,} bytes instead of {size:,}. " in str(caught.value)
    assert str(caught.value).endswith(f"Go on from the one before it with --resume={run.checkpoint(4)}")
    file.unlink()
    before = run.files()
    with pytest.raises(CheckpointError, match=rf"checkpoint-6 is damaged: {name} is missing\. Go on from the one befo"):
        run.go(resume=True)
    assert run.files() == before
    assert _start(run, run.checkpoint(4)) == 4


def test_an_older_checkpoint_that_is_damaged_too_is_not_offered(run: TrainedRun) -> None:
    (run.checkpoint(4) / "optimizer.pt").unlink()
    (run.checkpoint(6) / "files.json").unlink()
    with pytest.raises(CheckpointError, match=r"files\.json, which lists its files, is missing\. .*=.*checkpoint-2$"):
        _start(run)
    (run.checkpoint(2) / "scheduler.pt").unlink()
    with pytest.raises(CheckpointError, match="holds no older one. Start again with --overwrite"):
        _start(run)


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("optimizer.pt", "optimizer.pt has other bytes than were written"),
        ("model.safetensors", "model.safetensors has other bytes than were written"),
        ("plan.json", "plan.json is not a plan"),
    ],
)
def test_a_file_of_the_right_size_with_other_bytes_is_named_too(run: TrainedRun, name: str, named: str) -> None:
    file = run.checkpoint(STEPS) / name
    file.write_bytes(b"x" * file.stat().st_size)
    before = run.files()
    with pytest.raises(CheckpointError) as caught:
        run.go("train.steps=8", resume=True)
    assert "checkpoint-6" in str(caught.value) and named in str(caught.value)
    assert run.files() == before


@pytest.mark.thorough
def test_a_folder_that_is_not_complete_is_passed_over_and_it_is_said(
    run: TrainedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    (run.checkpoint(6) / "plan.json").unlink()
    run.go(resume=True)
    assert f"{run.checkpoint(6)} is not complete (it holds no plan.json) and is passed over" in capsys.readouterr().out
    assert run.checkpoint(6).with_name("checkpoint-6.superseded").is_dir()


def test_a_checkpoint_is_named_by_path_or_by_name_and_only_of_this_run(run: TrainedRun, whole: TrainedRun) -> None:
    assert [_start(run, Path(name)) for name in ("checkpoint-2", str(run.checkpoint(4)))] == [2, 4]
    for wrong in (Path("checkpoint-3"), whole.checkpoint(2), run.root / "text.txt"):
        with pytest.raises(CheckpointError, match="which holds checkpoint-2, checkpoint-4, checkpoint-6. A run goes"):
            _start(run, wrong)


def test_resume_takes_a_value_only_after_an_equals_sign(run: TrainedRun) -> None:
    results = [
        CliRunner().invoke(build_app(), ["train", *arguments, "--set", "train.steps=3"])
        for arguments in (
            ["--resume", str(run.job)],
            [str(run.job), "--resume"],
            [str(run.job), "--resume=checkpoint-4"],
            [str(run.job), "--resume=checkpoint-5"],
        )
    ]
    errors = [str(result.exception) for result in results]
    assert all("checkpoint-6 is already past that" in error for error in errors[:2])
    assert "checkpoint-4 is already past that" in errors[2]
    assert "--resume=checkpoint-5: that is no complete checkpoint" in errors[3]
    both = CliRunner().invoke(build_app(), ["train", str(run.job), "--resume=checkpoint-4", "--overwrite"])
    assert "give one of the two" in str(both.exception)


def test_truncated_weights_of_a_new_job_are_named(run: TrainedRun) -> None:
    weights = run.root / "weights"
    run.checkpoint(2).rename(weights)
    _truncate(weights / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"weights: model\.safetensors is damaged or truncated .* files again"):
        run.go(f"model.weights={weights}", f"model.config={weights}", f"train.output_dir={run.root / 'new'}")
    assert not (run.root / "new").exists()


@pytest.mark.parametrize("content", ["{}", "0", "[" * 100_000, "9" * 5000])
def test_sequences_of_another_form_are_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "sequences.json").write_text(content)
    with pytest.raises(CheckpointError, match="does not say on which sequences the checkpoint was trained"):
        check_sequences(tmp_path, '{"sequences": 4}')


def test_rows_are_compared_with_what_makes_their_tokens(tmp_path: Path) -> None:
    now = '{"sequences": 4, "sha256": "a", "tokens": "b"}'
    (tmp_path / "sequences.json").write_text('{"sequences": 4, "sha256": "a"}')  # of an earlier version
    check_sequences(tmp_path, now)
    (tmp_path / "sequences.json").write_text(now.replace('"b"', '"c"'))
    with pytest.raises(CheckpointError, match="other tokens of the same rows: the tokenizer, its chat template or"):
        check_sequences(tmp_path, now)


def test_a_list_of_files_that_is_nested_too_deeply_is_damage(tmp_path: Path) -> None:
    (tmp_path / "files.json").write_text("[" * 100_000)
    assert damage(tmp_path)[0].startswith("files.json, which lists its files, can't be read")


@pytest.mark.parametrize("name", ["model.safetensors", "shard-00000-model-00001-of-00001.safetensors"])
def test_weights_with_a_damaged_header_are_not_exported(tmp_path: Path, name: str) -> None:
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / name).write_bytes(b"\x02\0\0\0\0\0\0\0{}" + b"\0" * 8)
    with pytest.raises(CheckpointError, match=f"{name} is damaged or truncated"):
        export_checkpoint(checkpoint, tmp_path / "exported")
    assert not (tmp_path / "exported").exists()


def test_shards_without_torch_s_metadata_are_not_exported(run: TrainedRun, tmp_path: Path) -> None:
    checkpoint = run.checkpoint(STEPS)
    (checkpoint / "model.safetensors").rename(checkpoint / "shard-00000-model-00001-of-00001.safetensors")
    with pytest.raises(CheckpointError, match="its shards can't be joined"):
        export_checkpoint(checkpoint, tmp_path / "exported")
