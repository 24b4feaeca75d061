"""The folder that a run writes to: held by one job at a time, checked before training, and never left half written."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError

from veomni_core.errors import ConfigError, HostError
from veomni_trainer.output.folder import LOCK, locked
from veomni_trainer.report import write

Train = Callable[..., bool]
FULL = "No space left on device (os error 28)"  # as libraries in Rust say it


@pytest.mark.thorough
def test_a_folder_is_one_job_s_at_a_time(job_data: dict[str, Any], train: Train, run: Path) -> None:
    with locked(run):
        holder = json.loads((run / LOCK).read_text(encoding="utf-8"))
        with pytest.raises(HostError) as caught:
            train(job_data)
        assert f"another job is writing to {run} (process {os.getpid()} on {holder['host']}, since " in str(
            caught.value
        )
        assert "name another train.output_dir" in str(caught.value)
        with locked(run / "eager"), locked(run.with_name("other")):
            pass
    assert not run.exists()
    train(job_data)
    assert not (run / LOCK).exists()


def test_a_start_that_fails_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), locked(tmp_path / "runs" / "first"):
        raise RuntimeError
    (tmp_path / "mine").mkdir()
    with locked(tmp_path / "mine"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_the_lock_of_a_killed_job_is_free(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib, veomni_trainer.output.folder as lock\n"
        "with lock.locked(pathlib.Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as job:
        assert job.stdout is not None and job.stdout.readline() == "held\n"
        with pytest.raises(HostError, match=rf"\(process {job.pid} on "), locked(tmp_path):
            pass
        job.send_signal(signal.SIGKILL)
    assert (tmp_path / LOCK).exists()
    with locked(tmp_path):
        pass


def test_a_path_through_a_file_and_a_folder_that_cannot_be_written_are_refused_before_training(
    job_data: dict[str, Any], train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "text" / "a.txt"
    job_data["train"]["output_dir"] = str(file / "run")
    with pytest.raises(ConfigError, match=rf"train\.output_dir: .*run leads through the file {file}; name a folder"):
        train(job_data)
    job_data["train"]["output_dir"] = str(file)
    with pytest.raises(ConfigError, match="is a file; name a folder"):
        train(job_data)
    job_data["train"]["output_dir"] = "/proc/veomni/run"  # no user may write there
    with pytest.raises(HostError, match=r"/proc/veomni/run can't be written: .* Name a folder that this user may"):
        train(job_data)


@pytest.mark.thorough
def test_a_disk_without_room_for_a_checkpoint_is_refused_before_training(
    job_data: dict[str, Any], train: Train, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(run.parent)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=400_000))
    with pytest.raises(HostError, match="a checkpoint takes about 468,864 bytes, and the disk of .*run has 400,000"):
        train(job_data)
    assert not run.exists()
    train(job_data, "train.save_every=never")


@contextmanager
def _largest_file(size: int) -> Iterator[None]:
    """Writing beyond ``size`` fails, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.thorough
@pytest.mark.parametrize("size", [100_000, 200_000], ids=["weights", "optimizer"])
def test_a_disk_that_fills_up_leaves_earlier_checkpoints_whole(
    job_data: dict[str, Any], train: Train, run: Path, losses: Callable[[Path], Any], size: int
) -> None:
    train(job_data, "train.steps=2")
    kept = {path: path.read_bytes() for path in (run / "checkpoint-2").iterdir()}
    with _largest_file(size), pytest.raises(HostError) as caught:
        train(job_data, resume=True)
    assert "checkpoint-4 can't be written: " in str(caught.value)
    assert "a checkpoint takes about 468,864 bytes, and the disk of " in str(caught.value)
    assert str(caught.value).endswith("Free some, and go on from checkpoint-2, which is whole, with --resume")
    assert {path: path.read_bytes() for path in (run / "checkpoint-2").iterdir()} == kept
    assert not [*run.glob(".incomplete"), *run.glob("checkpoint-4")]
    train(job_data, resume=True)
    assert len(losses(run)) == 4


@pytest.mark.thorough(one_per=[])
@pytest.mark.parametrize(
    ("writer", "error", "says"),
    [
        (
            "checkpoints.write_manifest",
            Exception(FULL),
            "checkpoint-4 can't be written: .*, and go on from checkpoint-2",
        ),
        ("record.append_metrics", OSError(errno.ENOSPC, "full"), "metrics.jsonl or report.html can't be written: "),
        ("run_job.export_checkpoint", SafetensorError(FULL), "run/model can't be written: .* the same command"),
    ],
    ids=["tokenizers", "metrics", "export"],
)
def test_a_full_disk_is_named_by_what_was_being_written(
    job_data: dict[str, Any],
    train: Train,
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
    writer: str,
    error: Any,
    says: str,
) -> None:
    def full(*_: Any) -> None:
        raise error

    train(job_data, "train.steps=2")
    kept = {path: path.read_bytes() for path in (run / "checkpoint-2").iterdir()}
    monkeypatch.setattr(f"veomni_trainer.run.{writer}", full)
    with pytest.raises(HostError, match=says):
        train(job_data, "train.export=true", resume=True)
    assert {path: path.read_bytes() for path in (run / "checkpoint-2").iterdir()} == kept
    assert not [*run.glob(".incomplete"), *run.glob("*.tmp")]
    monkeypatch.undo()
    train(job_data, "train.export=true", resume=True)


@pytest.mark.thorough
def test_a_report_that_cannot_be_written_is_said_and_written_later(
    job_data: dict[str, Any], train: Train, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "report.html")

    monkeypatch.setattr(write, "write_whole", full)
    with pytest.raises(
        HostError, match=r"report\.html can't be written: .*No space left.* bytes free\. The checkpoints of"
    ):
        train(job_data)
    monkeypatch.undo()
    train(job_data, resume=True)
    assert (run / "report.html").exists()
