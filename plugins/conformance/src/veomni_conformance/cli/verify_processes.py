"""Checks each kernel in a process of its own, so that one that exits, crashes or hangs is reported as failed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from veomni_core.descriptions.kernel_spec import KernelSpec

OK, FAILED, SKIPPED, CONTRACT = "ok", "FAILED", "skipped", "CONTRACT FAILED"
EXPECTED = "failed as expected"
LAUNCH = "VEOMNI_LAUNCH"  # in the environment of a check: which launch searches give; empty if they are free


@dataclass(frozen=True)
class Row:
    """One kernel in one dtype: what is its ``result``, ``OK`` or another of the words above, and the ``detail`` of why.

    ``cases`` has the largest errors of values and gradients of each case, as shares of the tolerance. ``spent`` has the
    ``seconds`` by what they were spent on, as a :class:`~veomni_conformance.ConformanceReport`. ``functions`` has what
    was compiled ahead, as :class:`~veomni_conformance.triton_ahead.CompiledFunction`.
    """

    kernel: str
    dtype: str
    result: str
    detail: tuple[str, ...] = ()
    seconds: float = 0.0
    cases: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    spent: Mapping[str, float] = field(default_factory=dict)
    functions: tuple[Mapping[str, Any], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)


def joined(parts: list[Row]) -> Row:
    """The row of one kernel and dtype out of those of its parts."""
    if len(parts) == 1:
        return parts[0]
    results = [row.result for row in parts]
    result = next((each for each in (CONTRACT, FAILED) if each in results), OK)
    detail = tuple(dict.fromkeys(words for row in parts for words in row.detail))
    cases = {name: errors for row in parts for name, errors in row.cases.items()}
    if result == OK and not cases:
        result, detail = FAILED, ("its contract has no samples",)
    names = dict.fromkeys(name for row in parts for name in row.spent)
    spent = {name: round(sum(row.spent.get(name, 0.0) for row in parts), 2) for name in names}
    seconds = round(sum(row.seconds for row in parts), 2)
    return replace(parts[0], result=result, detail=detail, seconds=seconds, cases=cases, spent=spent)


class Checks:
    """Runs checks of kernels, several at a time if several threads ask. Each has a process of its own.

    The processes are forks of :mod:`~veomni_conformance.cli.verify_worker`, one of which is started for each thread.

    Args:
        probe: the module whose ``main`` runs one check.
        jobs: how many checks will run at a time.
        environment: what its processes have in their environment besides ours.
    """

    def __init__(self, probe: str, jobs: int, environment: Mapping[str, str]) -> None:
        self._command = [sys.executable, "-X", "faulthandler", "-m", "veomni_conformance.cli.verify_worker", probe]
        # By default each process has a thread per core, and torch.compile starts as many compilers beside it. Two
        # threads in each of as many processes as there are cores wait for each other: a check took five times as long.
        threads = {"OMP_NUM_THREADS": "2" if jobs == 1 else "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        self._environment = {**threads, **os.environ, **environment}
        self._idle: SimpleQueue[_Worker] = SimpleQueue()

    @classmethod
    def running(cls, jobs: int, launch: int | None = None) -> Checks:
        """Checks that run kernels through their contracts; ``launch`` is the one that Triton's searches give."""
        return cls("veomni_conformance.cli.verify_probe", jobs, {LAUNCH: "" if launch is None else str(launch)})

    @classmethod
    def compiling(cls, jobs: int) -> Checks:
        """Checks that compile what kernels launch by Triton, and run nothing."""
        return cls("veomni_conformance.cli.compile_probe", jobs, {"TRITON_INTERPRET": "0"})

    def __enter__(self) -> Checks:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(Empty):
            while True:
                self._idle.get_nowait().end()

    def rows(
        self,
        plugin: str,
        spec: KernelSpec,
        where: str,
        dtypes: tuple[str, ...],
        timeout: float,
        part: tuple[int, int] = (0, 1),
    ) -> list[Row]:
        """Check one kernel; one row per dtype. If its process ends early, the dtype that it was at and the rest fail.

        Args:
            plugin: the kernel's.
            spec: the kernel.
            where: a device, or the name of the GPU to compile for.
            dtypes: in which it is checked, one after the other.
            timeout: seconds for all of them.
            part: ``(index, count)``: only this one of ``count`` parts of the check.
        """
        with tempfile.TemporaryDirectory() as folder:
            written, errors = Path(folder) / "rows", Path(folder) / "errors"
            # Results go through a file, since kernels may print to standard output.
            unset = str(replace(spec, settings=()))
            arguments = [plugin, unset, where, ",".join(dtypes), f"{part[0]}/{part[1]}", str(written)]
            arguments += [json.dumps(dict(spec.settings))] if spec.settings else []
            problem = self._run(arguments, errors, timeout)
            lines = written.read_text().splitlines() if written.exists() else []
        rows = [Row(**{**json.loads(line), "kernel": str(spec)}) for line in lines]
        rows = [replace(row, detail=tuple(row.detail), functions=tuple(row.functions)) for row in rows]
        missing = dtypes[len(rows) :]
        if not missing:
            return rows
        sentences = [f"{problem}, at {missing[0]}", *(["not reached: its process was gone"] * (len(missing) - 1))]
        return [
            *rows,
            *(Row(str(spec), name, FAILED, (words,)) for name, words in zip(missing, sentences, strict=True)),
        ]

    def _run(self, arguments: list[str], errors: Path, timeout: float) -> str:
        """Run one check and describe how its process ended, for the case that it did not write all results."""
        worker = self._worker()
        try:
            answer = worker.answer({"arguments": arguments, "errors": str(errors), "timeout": timeout})
        except BaseException:  # an interrupt: nobody waits for the check any more
            worker.end()
            raise
        if answer is None:  # the worker itself is gone
            code = worker.end()
            errors.write_text(worker.last_words())
        else:
            code = answer["code"]
            self._idle.put(worker)
        if code is None:
            return f"did not end within {timeout:g} s (--timeout gives it longer)"
        if code < 0:
            return f"its process was killed by {_signal_name(-code)}"
        text = errors.read_text() if errors.exists() else ""
        last = (text.strip().splitlines() or ["no message"])[-1]
        return f"its process ended with code {code} before the check was over ({last})"

    def _worker(self) -> _Worker:
        with contextlib.suppress(Empty):
            return self._idle.get_nowait()
        return _Worker(self._command, self._environment)


class _Worker:
    """A process that forks one check after the other."""

    def __init__(self, command: list[str], environment: Mapping[str, str]) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  it lives as long as the process
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,  # an interrupt in the terminal is ours to pass on
        )

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any] | None:
        """Wait for its answer; ``None`` if it is gone."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        return json.loads(line) if line else None

    def end(self) -> int:
        """End it, with a check that it runs, and give its exit code."""
        self._process.terminate()
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate()
        return self._process.returncode

    def last_words(self) -> str:
        """What it wrote on standard error."""
        self._errors.seek(0)
        return self._errors.read()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
