"""Runs a kernel whose calls are made by several ranks: starts the ranks as processes and gathers what they found."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from veomni_conformance.rank_process import ENDED, LOST
from veomni_conformance.report import CaseResult
from veomni_core.descriptions.kernel_spec import KernelSpec
from veomni_core.descriptions.op_spec import OpSpec
from veomni_ops.rank_contract import MOST_RANKS


def check_on_ranks(spec: KernelSpec, op: OpSpec, device: torch.device, dtype: str) -> Iterator[CaseResult]:
    """One case for each sample of the contract, with what every rank found wrong."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # The kernel may be importable by the caller's sys.path alone.
        (folder / "task").write_bytes(pickle.dumps((sys.path, spec, op, device.type, dtype)))
        ended = _run(folder)
        found = [_lines(folder / f"rank{rank}") for rank in range(MOST_RANKS)]
    names = list(dict.fromkeys(line["sample"] for lines in found for line in lines))
    lost_alone = all(set(line["failures"]) <= {LOST} for lines in found for line in lines)
    for lines in found:
        for line in lines:  # what a rank's end does to the others says nothing that the rank itself doesn't
            line["failures"] = [failure for failure in line["failures"] if lost_alone or failure != LOST]
    for sample in names:
        yield _merged(sample, [next((x for x in lines if x["sample"] == sample), None) for lines in found])
    if ended:
        yield CaseResult("the processes", ended)


def _merged(sample: str, lines: list[dict[str, Any] | None]) -> CaseResult:
    failures = []
    value = gradient = 0.0
    for line in lines:
        if line is not None:
            failures += [f"rank {line['rank']}: {failure}" for failure in line["failures"]]
            value, gradient = max(value, line["worst_value"]), max(gradient, line["worst_gradient"])
    return CaseResult(sample, tuple(failures), value, gradient)


def _run(folder: Path) -> tuple[str, ...]:
    """Run the ranks, and say how they ended if one did not end well."""
    command = [sys.executable, "-m", "veomni_conformance.rank_process", str(folder)]
    with (folder / "errors").open("w+") as errors:
        launcher = subprocess.run(
            command,
            env={"OMP_NUM_THREADS": "1", **os.environ},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
        )
        if launcher.returncode:
            errors.seek(0)
            return (f"the ranks were not started: ended with code {launcher.returncode} ({_last_line(errors.read())})",)
    ended = []
    for rank, code in enumerate(json.loads((folder / ENDED).read_text())):
        if code is None:
            ended.append(f"rank {rank} did not end, so it was killed")
        elif code:
            ended.append(f"rank {rank} ended with code {code} ({_last_line((folder / f'errors{rank}').read_text())})")
    return tuple(ended)


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no message"])[-1][:300]


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
