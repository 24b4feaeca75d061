"""Which kernels failed ``veomni verify`` on this machine: a file in the user's cache, which every plan reads.

A failure counts for the very kernel, files, device and versions with which it was found
(:class:`~veomni_core.planning.this_machine.CheckedKernel`). A later pass removes it. The file is a memory, not a
condition: one that is damaged, or can't be written, is a warning.
"""

from __future__ import annotations

import datetime
import json
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from veomni_core.planning.this_machine import CheckedKernel

logger = logging.getLogger(__name__)
_LONGEST_REASON = 200
_warned: set[Path] = set()


@dataclass(frozen=True)
class FailedCheck:
    """That a kernel failed, when, and how."""

    checked: CheckedKernel
    date: str
    reason: str

    def __str__(self) -> str:
        checked = self.checked
        return (
            f"failed veomni verify in {checked.dtype} on {self.date}: {self.reason} "
            f"(veomni verify {checked.distribution} --kernel {checked.kernel} checks it again)"
        )


def cache_file() -> Path:
    """The file, in ``VEOMNI_CACHE``, or else in ``veomni`` of the user's cache folder."""
    folder = os.environ.get("VEOMNI_CACHE")
    if not folder:
        folder = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "veomni")
    return Path(folder) / "failed_checks.json"


def failed_checks() -> dict[CheckedKernel, FailedCheck]:
    """What is in the file; nothing if there is none, or if it is damaged, which is a warning."""
    path = cache_file()
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        failures = [FailedCheck(CheckedKernel(**e["checked"]), str(e["date"]), str(e["reason"])) for e in entries]
        return {failure.checked: failure for failure in failures}
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, TypeError, KeyError) as error:
        warn_once(path, f"can't be read ({error}), so no failure of veomni verify is remembered. Remove the file")
        return {}


def remember(failed: Mapping[CheckedKernel, str], passed: Iterable[CheckedKernel]) -> None:
    """Write the failures with their reasons to the file, and remove those of the kernels that ``passed``.

    The file appears whole: who reads it meanwhile has the old one.
    """
    known = failed_checks()
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    news = {checked: FailedCheck(checked, today, _short(reason)) for checked, reason in failed.items()}
    kept = {checked: failure for checked, failure in known.items() if checked not in {*passed}} | news
    if kept == known:
        return
    write_whole(cache_file(), [asdict(failure) for failure in kept.values()])


def write_whole(path: Path, entries: Iterable[object]) -> None:
    """Write ``entries`` to ``path`` as JSON, so that the file appears whole. That it can't be written is a warning."""
    text = json.dumps(list(entries), indent=1)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        written = path.with_name(f"{path.name}.{os.getpid()}")
        try:
            written.write_text(text, encoding="utf-8")
            written.replace(path)
        finally:
            written.unlink(missing_ok=True)
    except OSError as error:
        warn_once(
            path,
            f"can't be written ({error}), so plans will not know what was verified. Set VEOMNI_CACHE to a folder that "
            "can be written",
        )


def _short(reason: str) -> str:
    words = " ".join(reason.split())
    return words if len(words) <= _LONGEST_REASON else f"{words[:_LONGEST_REASON]}…"


def warn_once(path: Path, problem: str) -> None:
    """Log what is wrong with the file ``path``, the first time."""
    if path not in _warned:
        _warned.add(path)
        logger.warning("%s %s", path, problem)
