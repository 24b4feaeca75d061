"""Checks each kernel in a process of its own, so that one that exits, crashes or hangs is reported as failed."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import Any

from veomni_conformance.cli.verify_probe import Request, begin
from veomni_core.descriptions.kernel_spec import KernelSpec

OK, FAILED, SKIPPED, CONTRACT = "ok", "FAILED", "skipped", "CONTRACT FAILED"
EXPECTED = "failed as expected"
# Ops whose contracts take longest: four ranks, recurrences by the token, many samples, many kernels to compile.
LONGEST_OPS = (
    "token_dispatch",
    "chunk_gated_delta_rule",
    "causal_conv1d",
    "kda",
    "mamba2_scan",
    "selective_scan",
    "moe_experts",
    "attention",
    "token_logprobs",
)
CONTEXT = multiprocessing.get_context("forkserver")
_ONE_AT_A_TIME = Lock()  # processes are started and looked after by several threads
_PAUSE = 0.02  # seconds between two looks at a check


@dataclass(frozen=True)
class Row:
    """One kernel in one dtype: its ``result``, ``OK`` or another of the words above, and the ``detail`` of why.

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


@dataclass(frozen=True)
class Check:
    """A kernel of a plugin in one dtype, and which of how many parts of its check."""

    plugin: str
    spec: KernelSpec
    dtype: str
    part: tuple[int, int] = (0, 1)


class Checks:
    """Runs checks of kernels, several at a time, each in a process of its own.

    pytest-xdist is not used: its workers run many tests each, and end none that hangs. The processes are forks of one
    that has imported torch and its compilers (:mod:`~veomni_conformance.cli.verify_preload`).

    Args:
        where: a device, or with ``compiles`` the name of a GPU.
        jobs: how many checks run at a time.
        timeout: seconds that one may take.
        launch: which launch Triton's searches take; ``None`` leaves them free.
        compiles: compile what kernels launch by Triton, and run nothing.
    """

    def __init__(
        self, where: str, jobs: int, timeout: float = 600.0, launch: int | None = None, compiles: bool = False
    ) -> None:
        self._request = Request("", "", "", where, "", launch=launch, compiles=compiles)
        self._jobs, self._timeout, self._over = jobs, timeout, False
        # By default each process has a thread per core, and torch.compile starts as many compilers beside it. Two
        # threads in each of as many processes as there are cores wait for each other: a check took five times as long.
        threads = {"OMP_NUM_THREADS": "2" if jobs == 1 else "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        self._environment = {**threads, **os.environ, **({"TRITON_INTERPRET": "0"} if compiles else {})}

    def rows(self, asked: Sequence[Check], done: Callable[[Check, Row], object] = lambda check, row: None) -> list[Row]:
        """Check each kernel, and call ``done`` with each check and its row. One whose process ends before that fails.

        The longest begin first, so that none of them is the last one, alone. Checks share the memory of a device: those
        that found too little of it are made again, one at a time.
        """
        longest_first = sorted(range(len(asked)), key=lambda index: _rank(asked[index].spec))
        with ThreadPoolExecutor(self._jobs) as pool:
            try:
                found = {index: pool.submit(self._row, asked[index], done) for index in longest_first}
                rows = [found[index].result() for index in range(len(asked))]
            except BaseException:  # an interrupt: nobody waits for the checks any more
                self._over = True
                pool.shutdown(cancel_futures=True)
                raise
        if self._jobs == 1:
            return rows
        return [self._checked(asked[index]) if _lacked_memory(row) else row for index, row in enumerate(rows)]

    def _row(self, check: Check, done: Callable[[Check, Row], object]) -> Row:
        row = self._checked(check)
        done(check, row)
        return row

    def _checked(self, check: Check) -> Row:
        with tempfile.TemporaryDirectory() as folder:
            written, errors = Path(folder) / "row", Path(folder) / "errors"
            request = replace(
                self._request,
                plugin=check.plugin,
                kernel=str(replace(check.spec, settings=())),
                dtype=check.dtype,
                file=str(written),
                part=check.part,
                settings=dict(check.spec.settings),
            )
            problem = self._run(request, errors)
            if not written.exists():
                return Row(str(check.spec), check.dtype, FAILED, (problem,))
            row = Row(kernel=str(check.spec), **json.loads(written.read_text()))
        return replace(row, detail=tuple(row.detail), functions=tuple(row.functions))

    def _run(self, request: Request, errors: Path) -> str:
        """Run one check and describe how its process ended, for the case that it did not write its row."""
        process = CONTEXT.Process(target=begin, args=(request, str(errors), self._environment))
        with _ONE_AT_A_TIME:
            process.start()
        code, ends = None, time.monotonic() + self._timeout
        while code is None and time.monotonic() < ends and not self._over:
            time.sleep(_PAUSE)
            with _ONE_AT_A_TIME:
                code = process.exitcode
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        if code is None:
            process.kill()
            return f"did not end within {self._timeout:g} s (--timeout gives it longer)"
        if code < 0:
            return f"its process was killed by {_signal_name(-code)}"
        text = errors.read_text() if errors.exists() else ""
        last = (text.strip().splitlines() or ["no message"])[-1]
        return f"its process ended with code {code} before the check was over ({last})"


def import_once() -> None:
    """Fork checks from a process with the common imports made; without this call each check makes them."""
    CONTEXT.set_forkserver_preload(["veomni_conformance.cli.verify_preload"])


def _lacked_memory(row: Row) -> bool:
    """Whether it failed for that: PyTorch's allocator, CUDA and cuBLAS each have an error of their own."""
    words = " ".join(row.detail).lower()
    return row.result in (FAILED, CONTRACT) and ("out of memory" in words or "alloc_failed" in words)


def _rank(spec: KernelSpec) -> tuple[bool, int]:
    return not spec.slow_check, LONGEST_OPS.index(spec.op_name) if spec.op_name in LONGEST_OPS else len(LONGEST_OPS)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
