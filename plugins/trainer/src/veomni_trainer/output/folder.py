"""A run's output folder: its files, whether an earlier run is in it, and which of its checkpoints are complete.

One job at a time writes to it: a lock says so, that the operating system takes away when its process ends.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from filelock import FileLock, Timeout

from veomni_core.errors import CheckpointError, ConfigError, HostError
from veomni_trainer.output.disk import existing

LOCK = ".lock"
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_SET_ASIDE = ".superseded"


class _Within:
    """A path within a run's folder."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, folder: RunFolder, owner: type) -> Path:
        return folder.path / self._name


@dataclass(frozen=True)
class RunFolder:
    """The paths in a run's folder.

    Nothing is written to the folder before a run's first step is done, so a start that fails leaves it unchanged.
    """

    path: Path

    metrics = _Within("metrics.jsonl")
    """One JSON object per logged step."""
    expert_rows = _Within("expert_rows.jsonl")
    """One JSON object per logged step: ``rows[layer][expert]``, where experts' loads are measured."""
    plan = _Within("plan.json")
    """The plan that the run trains with."""
    receipt = _Within("receipt.json")
    """The receipt: which kernel was bound where."""
    job = _Within("job.yaml")
    """The job with all defaults and the changes of ``--set``."""
    data = _Within("data.json")
    """What was read of the job's files and what was left out: an object per source."""
    summary = _Within("summary.json")
    """The run's key figures, and the comparison."""
    report = _Within("report.html")
    """The report, an HTML page."""
    exported = _Within("model")
    """The weights at the end, as a plain folder of safetensors, where the job asks for it."""
    profile = _Within("profile")
    """A trace of a few steps, and a table of where their time went, where the job profiles them."""
    staging = _Within(".incomplete")
    """The folder in which checkpoints are written before they are moved to their final path, and that they leave by."""

    def compared(self, name: str) -> RunFolder:
        """The folder of the run that this one is compared with."""
        return RunFolder(self.path / name)

    def checkpoints(self) -> list[tuple[int, Path]]:
        """The complete checkpoints, oldest first."""
        return [(step, path) for step, path in self._checkpoint_folders() if _is_complete(path)]

    def incomplete_checkpoints(self) -> list[tuple[int, Path]]:
        """The folders that have a checkpoint's name and are none, or not all of one; oldest first."""
        return [(step, path) for step, path in self._checkpoint_folders() if not _is_complete(path)]

    def check_free(self) -> None:
        """Raise if a new run would overwrite the results of an earlier one.

        Raises:
            ConfigError: the folder holds a run, or ``path`` isn't a folder.
        """
        existing(self.path)
        if any(path.exists() for path in self._results()):
            can_resume = "continue it with --resume, " if self.checkpoints() else ""
            raise ConfigError(
                f"train.output_dir: {self.path} holds an earlier run. Choose another folder, {can_resume}or replace it "
                "with --overwrite"
            )

    def last_checkpoint(self) -> tuple[int, Path]:
        """The newest complete checkpoint.

        Raises:
            CheckpointError: there is no complete checkpoint.
        """
        if not self.checkpoints():
            raise CheckpointError(
                f"--resume: there is nothing to resume in {self.path}: it holds no complete checkpoint. "
                "Start without --resume"
            )
        return self.checkpoints()[-1]

    def checkpoint(self, named: Path) -> tuple[int, Path]:
        """The complete checkpoint that is ``named`` by its path, or by its name in this folder.

        Raises:
            CheckpointError: this folder has no such checkpoint.
        """
        for step, path in self.checkpoints():
            if named in (path, Path(path.name)) or named.absolute() == path.absolute():
                return step, path
        have = ", ".join(path.name for _, path in self.checkpoints()) or "none"
        raise CheckpointError(
            f"--resume={named}: that is no complete checkpoint of {self.path}, which holds {have}. A run goes on in "
            "its own folder; to start a new one from a checkpoint's weights, name the checkpoint as model.weights"
        )

    def clear(self) -> None:
        """Remove an earlier run's results; other files in the folder stay."""
        for path in self._results():
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def set_aside_after(self, step: int) -> None:
        """Rename the checkpoints after ``step``: the run goes on from there, and they are none of its own any more."""
        for found, path in self._checkpoint_folders():
            if found > step:
                names = (path.with_name(f"{path.name}{_SET_ASIDE}{number}") for number in ("", *range(2, 1000)))
                path.rename(next(name for name in names if not name.exists()))

    def drop_checkpoints(self, keep: int) -> None:
        """Keep the newest ``keep`` checkpoints only.

        They are removed from the staging folder, which the next start clears, if a kill leaves some of one.
        """
        for _, path in self.checkpoints()[:-keep]:
            self.staging.mkdir(exist_ok=True)
            shutil.rmtree(path.rename(self.staging / f"{path.name}.dropped"))

    def _checkpoint_folders(self) -> list[tuple[int, Path]]:
        found = [(int(match[1]), p) for p in self.path.glob("checkpoint-*") if (match := _CHECKPOINT.fullmatch(p.name))]
        return sorted((step, path) for step, path in found if path.is_dir())

    def _results(self) -> list[Path]:
        files = [
            self.metrics,
            self.expert_rows,
            self.plan,
            self.receipt,
            self.data,
            self.job,
            self.summary,
            self.report,
        ]
        folders = [path for _, path in self._checkpoint_folders()]
        folders += self.path.glob(f"checkpoint-*{_SET_ASIDE}*")
        eager = self.compared("eager")
        written = (self.exported / name for name in ("config.json", "adapter_config.json"))
        folders += [self.exported] if any(path.exists() for path in written) else []
        folders += [self.profile] if (self.profile / "table.json").exists() else []
        return [*files, *folders, *([eager.path] if eager.metrics.exists() else [])]


def _is_complete(checkpoint: Path) -> bool:
    return (checkpoint / "plan.json").is_file()  # written last


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of ``folder``, which is made if it isn't there, and removed again if nothing was written to it.

    Raises:
        ConfigError: the folder's path leads through a file.
        HostError: another job holds the lock, or the folder can't be written.
    """
    existing(folder)
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    path = folder / LOCK
    lock = FileLock(path, timeout=0)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
        now = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")
        job = {"pid": os.getpid(), "host": socket.gethostname(), "since": now}
        path.write_text(json.dumps(job), encoding="utf-8")
    except Timeout:
        raise HostError(
            f"train.output_dir: another job is writing to {folder}{_holder(path)}. Wait until it ends, stop it, or "
            "name another train.output_dir"
        ) from None
    except OSError as error:
        lock.release()
        _remove(made)
        raise HostError(
            f"train.output_dir: {folder} can't be written: {error}. Name a folder that this user may write to"
        ) from error
    try:
        yield
    finally:
        # While the lock is held: who opened the file before that finds it locked, or gone.
        path.unlink(missing_ok=True)
        lock.release()
        _remove(made)


def _holder(path: Path) -> str:
    """Who holds the lock, as far as the file says it: it is written just after the lock is taken."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        job = json.loads(path.read_text(encoding="utf-8"))
        return f" (process {job['pid']} on {job['host']}, since {job['since']})"
    return ""


def _remove(made: list[Path]) -> None:
    """Remove the folders that were made for the lock, as far as they are empty, the innermost first."""
    with suppress(OSError):
        for path in made:
            path.rmdir()
