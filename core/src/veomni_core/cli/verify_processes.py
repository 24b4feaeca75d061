"""Checks one kernel in a separate process, so that a kernel that exits, crashes or hangs is reported as failed."""

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
from typing import Any

from veomni_core.descriptions.kernel_spec import KernelSpec

# By default each process has a thread per core, and torch.compile starts as many compilers beside it.
_FEW_THREADS = {"OMP_NUM_THREADS": "2", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
OK, FAILED, SKIPPED, CONTRACT = "ok", "FAILED", "skipped", "CONTRACT FAILED"


@dataclass(frozen=True)
class Row:
    """One kernel in one dtype: ``result`` is ``OK``, ``FAILED``, ``SKIPPED`` or ``CONTRACT``, ``detail`` says why.

    ``cases`` has the largest errors of values and gradients of each case, as shares of the tolerance. ``functions`` has
    what was compiled ahead, as :class:`~veomni_core.testing.triton_ahead.CompiledFunction`.
    """

    kernel: str
    dtype: str
    result: str
    detail: tuple[str, ...] = ()
    seconds: float = 0.0
    cases: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    functions: tuple[Mapping[str, Any], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)


def verify_kernel(plugin: str, spec: KernelSpec, device: str, dtypes: tuple[str, ...], timeout: float) -> list[Row]:
    """Check the kernel; one row per dtype. If the process ends early, the dtype it was checking and the rest fail."""
    return _rows("veomni_core.cli.verify_probe", plugin, spec, device, dtypes, timeout, {})


def compile_kernel(
    plugin: str, spec: KernelSpec, capability: int, dtypes: tuple[str, ...], timeout: float
) -> list[Row]:
    """Compile what the kernel launches by Triton for a compute capability; one row per dtype, as above."""
    compiles = {"TRITON_INTERPRET": "0"}
    return _rows("veomni_core.cli.compile_probe", plugin, spec, f"{capability}", dtypes, timeout, compiles)


def _rows(
    module: str,
    plugin: str,
    spec: KernelSpec,
    where: str,
    dtypes: tuple[str, ...],
    timeout: float,
    environment: Mapping[str, str],
) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "rows"
        # Results go through a file, since kernels may print to standard output.
        command = [sys.executable, "-X", "faulthandler", "-m", module]
        problem = _run([*command, plugin, str(spec), where, ",".join(dtypes), str(written)], timeout, environment)
        lines = written.read_text().splitlines() if written.exists() else []
    rows = [Row(**{**json.loads(line), "kernel": str(spec)}) for line in lines]
    rows = [replace(row, detail=tuple(row.detail), functions=tuple(row.functions)) for row in rows]
    missing = dtypes[len(rows) :]
    if not missing:
        return rows
    sentences = [f"{problem}, at {missing[0]}", *(["not reached: its process was gone"] * (len(missing) - 1))]
    return [*rows, *(Row(str(spec), name, FAILED, (words,)) for name, words in zip(missing, sentences, strict=True))]


def _run(command: list[str], timeout: float, environment: Mapping[str, str]) -> str:
    """Run ``command`` and describe how it ended, for the case that it did not write all results."""
    with tempfile.TemporaryFile("w+") as errors:
        # In a separate session, so that compilers that it started are killed with it.
        process = subprocess.Popen(
            command,
            env={**_FEW_THREADS, **os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            return f"did not end within {timeout:g} s (--timeout gives it longer)"
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        errors.seek(0)
        text = errors.read()
    if code < 0:
        return f"its process was killed by {_signal_name(-code)}"
    last = (text.strip().splitlines() or ["no message"])[-1]
    return f"its process ended with code {code} before the check was over ({last})"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
