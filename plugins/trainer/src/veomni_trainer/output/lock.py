"""One job at a time in an output folder: a lock that the operating system takes away when its process ends."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from filelock import FileLock, Timeout

from veomni_core.errors import HostError
from veomni_trainer.output.disk import existing

LOCK = ".lock"


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
        path.write_text(json.dumps(_this_job()), encoding="utf-8")
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


def _this_job() -> dict[str, str | int]:
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": datetime.now().astimezone().strftime("%Y-%m-%d %H:%M:%S %Z"),
    }


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
