"""Runs the tests on a tree with a fault: the near files first, and then the whole suite."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from faults.copied_tree import CopiedTree
from faults.listed import Fault

CAUGHT, COLLECTION, HUNG, NOT_CAUGHT, BROKEN = "caught", "not collected", "hung", "not caught", "not run"
_FIRST_FAILURE = "FAULTS_FIRST_FAILURE"  # names the file that the plugin writes
_PASSED, _FAILED, _INTERRUPTED, _NONE_CHOSEN = 0, 1, 2, 5  # pytest's exit codes


@dataclass(frozen=True)
class Ended:
    """How one run of pytest ended: its exit code, ``None`` where it was killed; and the first failure."""

    code: int | None
    seconds: float
    output: str = ""
    test: str = ""
    when: str = ""

    @property
    def shows_nothing(self) -> bool:
        """Whether every test passed that was run. A run that took more CPU time than it should fails without a test."""
        return self.code in (_PASSED, _NONE_CHOSEN) or (self.code == _FAILED and not self.test)


class SuiteRuns:
    """The runs of one suite on one tree.

    Args:
        tree: the tree.
        suite: ``test`` is what ``make test`` runs, and ``all`` what ``make test-all`` does.
        workers: how many processes run the whole suite; with 0, it is not run.
        near_seconds, whole_seconds: after so many seconds a run is killed.
        passing: tests that are known to pass without a fault; others that fail are run once without it.
    """

    def __init__(
        self,
        tree: CopiedTree,
        suite: str,
        workers: int,
        near_seconds: float = 900.0,
        whole_seconds: float = 7200.0,
        passing: Iterable[str] = (),
    ) -> None:
        self._tree, self._workers = tree, workers
        self._near_seconds, self._whole_seconds = near_seconds, whole_seconds
        self._sound = set(passing)
        self._unsound: set[str] = set()
        # Trees of a time before the suites were told apart don't have the option.
        self._suite = ["--suite", suite] if (tree.folder / "tests/suites/selection.py").is_file() else []

    def result(self, fault: Fault) -> dict[str, object]:
        """What became of ``fault``, as plain data."""
        began = time.monotonic()
        ended = self._first_sound_failure(fault, ["-n", "0", *fault.near], self._near_seconds)
        if not ended.test and ended.code is not None and self._workers:
            everything = ["-n", str(self._workers), "--dist", "worksteal"]
            ended = self._first_sound_failure(fault, everything, self._whole_seconds)
        result = _result(ended, fault)
        found: dict[str, object] = {"result": result, "commit": self._tree.commit, "suite": " ".join(self._suite)}
        found |= {"seconds": round(time.monotonic() - began), "last_run": round(ended.seconds)}
        if ended.test:
            found["test"] = ended.test
        if result == NOT_CAUGHT:
            found["asked"] = "the whole suite" if self._workers else "the near files"
        if result in (BROKEN, HUNG):
            found["output"] = ended.output[-1500:]
        return found

    def _first_sound_failure(self, fault: Fault, arguments: list[str], most: float) -> Ended:
        """Run the tests. One that fails without the fault too catches nothing: it is left out, from then on."""
        while True:
            with self._tree.with_fault(fault):
                ended = self._run([*arguments, *(f"--deselect={each}" for each in sorted(self._unsound))], most)
            if not ended.test or self._is_sound(ended):
                return ended
            self._unsound.add(ended.test)
            print(f"left out, since it fails without a fault too: {ended.test}", flush=True)

    def _is_sound(self, ended: Ended) -> bool:
        """Whether the test that failed passes without the fault; asked once of each test."""
        if ended.test not in self._sound and ended.test not in self._unsound:
            how = ["--collect-only"] if ended.when == "collect" else []
            if self._run(["-n", "0", *how, ended.test], self._near_seconds).code == _PASSED:
                self._sound.add(ended.test)
        return ended.test in self._sound

    def _run(self, arguments: list[str], most: float) -> Ended:
        """One run of pytest, with all that it starts in a group of processes of its own."""
        command = [sys.executable, "-m", "pytest", *self._suite, "-x", "-q", "-p", "no:cacheprovider"]
        # That test compares the list of faults with the sources, so it would fail with any of them.
        command += ["-p", "faults_first_failure", "--ignore=tests/test_faults.py", *arguments]
        with tempfile.TemporaryDirectory(prefix="fault-run-") as name:
            failure, output = Path(name) / "failure.json", Path(name) / "output"
            began = time.monotonic()
            with output.open("wb") as stream:
                process = subprocess.Popen(
                    command,
                    cwd=self._tree.folder,
                    env={**self._tree.environment(), _FIRST_FAILURE: str(failure)},
                    stdin=subprocess.DEVNULL,
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                code = _waited_for(process, most)
            seconds = time.monotonic() - began
            first = json.loads(failure.read_text(encoding="utf-8")) if failure.exists() else {}
            return Ended(code, seconds, output.read_text(encoding="utf-8", errors="replace"), **first)


def _waited_for(process: subprocess.Popen[bytes], most: float) -> int | None:
    """The exit code; ``None`` if it had to be killed, with all that it started."""
    try:
        return process.wait(most)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _result(ended: Ended, fault: Fault) -> str:
    if ended.code is None:
        return CAUGHT if fault.may_hang else HUNG
    if ended.when == "collect":
        return COLLECTION
    if ended.code in (_FAILED, _INTERRUPTED) and ended.test:  # xdist interrupts its workers at the first failure
        return CAUGHT
    return NOT_CAUGHT if ended.shows_nothing else BROKEN
