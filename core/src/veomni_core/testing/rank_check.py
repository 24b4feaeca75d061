"""Runs a kernel whose calls are made by several ranks: starts the ranks as processes and gathers what they found."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from veomni_core.descriptions.kernel_spec import KernelSpec
from veomni_core.descriptions.op_spec import OpSpec
from veomni_core.ops.rank_contract import MOST_RANKS
from veomni_core.testing.rank_process import LOST, PATIENCE
from veomni_core.testing.report import CaseResult

_ENOUGH_SECONDS = 300.0  # for all samples


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
    worst = {"worst_value": 0.0, "worst_gradient": 0.0}
    for rank, line in enumerate(lines):
        if line is not None:
            failures += [f"rank {rank}: {failure}" for failure in line["failures"]]
            worst = {key: max(value, line[key]) for key, value in worst.items()}
    return CaseResult(sample, tuple(failures), **worst)


def _run(folder: Path) -> tuple[str, ...]:
    """Run the ranks, and say how they ended if one did not end well."""
    command = [sys.executable, "-m", "veomni_core.testing.rank_process", str(folder)]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    errors = [(folder / f"errors{rank}").open("w+") for rank in range(MOST_RANKS)]
    processes = [
        subprocess.Popen(
            [*command, str(rank)], env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=file
        )
        for rank, file in enumerate(errors)
    ]
    _wait(processes)
    ended = []
    for rank, (process, file) in enumerate(zip(processes, errors, strict=True)):
        if (code := process.poll()) is None:
            ended.append(f"rank {rank} did not end, so it was killed")
            process.kill()
            process.wait()
        elif code:
            file.seek(0)
            last = (file.read().strip().splitlines() or ["no message"])[-1]
            ended.append(f"rank {rank} ended with code {code} ({last[:300]})")
        file.close()
    return tuple(ended)


def _wait(processes: list[subprocess.Popen[bytes]]) -> None:
    """Until all have ended. Where one has, the others follow at once, or hang: it was out of step with them."""
    deadline = time.monotonic() + _ENOUGH_SECONDS
    first_to_end = None
    while any(process.poll() is None for process in processes):
        now = time.monotonic()
        if first_to_end is None and any(process.poll() is not None for process in processes):
            first_to_end = now
        if now > deadline or (first_to_end is not None and now > first_to_end + PATIENCE):
            return
        time.sleep(0.05)


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
