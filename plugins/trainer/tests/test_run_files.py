"""What a run writes: whole or not at all, once, and not over another run's results."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from veomni_core.errors import CheckpointError, ConfigError
from veomni_trainer.output.folder import RunFolder
from veomni_trainer.output.metrics import append_metrics, figures, read_metrics, steady, truncate_metrics
from veomni_transformers.whole_files import publish_folder, write_whole


def _checkpoint(run: Path, step: int, complete: bool = True) -> Path:
    folder = run / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    (folder / "trainer_state.json").touch()
    if complete:
        (folder / "plan.json").touch()
    return folder


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "new" / "report.html"
    write_whole(path, "first")
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_whole(path, "second")
    assert path.read_text(encoding="utf-8") == "first"
    assert [p.name for p in path.parent.iterdir()] == ["report.html"]


def test_a_folder_is_moved_with_all_that_is_in_it(tmp_path: Path) -> None:
    _checkpoint(tmp_path / "staging", 3)
    publish_folder(tmp_path / "staging" / "checkpoint-3", tmp_path / "checkpoint-3")
    assert (tmp_path / "checkpoint-3" / "plan.json").exists()
    assert not (tmp_path / "staging" / "checkpoint-3").exists()


def test_only_complete_checkpoints_count(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with pytest.raises(CheckpointError, match=r"there is nothing to resume in .* Start without --resume"):
        folder.last_checkpoint()
    newest = [_checkpoint(tmp_path, step) for step in (2, 9, 10)][-1]
    _checkpoint(tmp_path, 11, complete=False)
    _checkpoint(tmp_path / ".incomplete", 12)
    (tmp_path / "checkpoint-best").mkdir()
    assert folder.last_checkpoint() == (10, newest)
    folder.drop_checkpoints(keep=2)
    assert [step for step, _ in folder.checkpoints()] == [9, 10]


def test_a_kill_while_a_checkpoint_is_removed_leaves_none_of_it_among_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path)
    for step in (1, 2):
        _checkpoint(tmp_path, step)

    def killed(path: Path) -> None:
        (path / "plan.json").unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr("veomni_trainer.output.folder.shutil.rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        folder.drop_checkpoints(keep=1)
    assert [step for step, _ in folder.checkpoints()] == [2] and not folder.incomplete_checkpoints()
    assert list(folder.staging.iterdir())  # which the next start removes


def test_a_folder_that_is_taken_is_refused_with_what_to_do(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.check_free()
    folder.path.mkdir()
    (folder.path / "notes.txt").touch()
    folder.check_free()
    folder.metrics.touch()
    with pytest.raises(
        ConfigError, match=r"holds an earlier run\. Choose another folder, or replace it with --overwrite"
    ):
        folder.check_free()
    _checkpoint(folder.path, 5)
    with pytest.raises(ConfigError, match="continue it with --resume, or replace it with --overwrite"):
        folder.check_free()
    with pytest.raises(ConfigError, match="is a file; name a folder"):
        RunFolder(folder.metrics).check_free()


def test_clearing_removes_results_and_nothing_else(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for path in (folder.metrics, folder.report, folder.compared("eager").metrics, tmp_path / "notes.txt"):
        path.parent.mkdir(exist_ok=True)
        path.touch()
    _checkpoint(tmp_path, 1)
    folder.clear()
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_metrics_survive_a_half_written_line_and_hold_no_step_twice(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert read_metrics(path) == []
    for step in (1, 2, 3):
        append_metrics(path, {"step": step, "loss": 1.0})
    with path.open("a", encoding="utf-8") as stream:
        stream.write('{"step": 4, "lo')
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3]
    truncate_metrics(path, 2)
    append_metrics(path, {"step": 3, "loss": 1.0})
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3]


def test_figures_leave_the_warm_up_out() -> None:
    rows = [
        {
            "step": step,
            "loss": 1 / step,
            "step_seconds": 9.0 if step < 3 else 1.0,
            "tokens_per_second": 10.0,
            "peak_memory_bytes": step,
        }
        for step in range(1, 11)
    ]
    rows.append({"step": 10, "validation_loss": 0.5})
    assert [row["step"] for row in steady(rows)] == list(range(3, 11))
    found = figures(rows)
    assert (found["step_seconds"], found["peak_memory_bytes"], found["validation_loss"]) == (1.0, 10, 0.5)
    assert (found["first_loss"], found["last_loss"]) == (1.0, 0.1)
    assert figures([]) == {}
