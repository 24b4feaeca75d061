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
from veomni_core.testing.report import CaseResult

_ENOUGH_SECONDS = 300.0  # for all samples; a rank that waits for another one gives up earlier by itself


def check_on_ranks(spec: KernelSpec, op: OpSpec, device: torch.device, dtype: str) -> Iterator[CaseResult]:
    """One case for each sample of the contract, with what every rank found wrong."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # The kernel may be importable by the caller's sys.path alone.
        (folder / "task").write_bytes(pickle.dumps((sys.path, spec, op, device.type, dtype)))
        ended = _run(folder)
        found = [_lines(folder / f"rank{rank}") for rank in range(MOST_RANKS)]
    names = list(dict.fromkeys(line["sample"] for lines in found for line in lines))
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
    deadline = time.monotonic() + _ENOUGH_SECONDS
    ended = []
    for rank, process in enumerate(processes):
        try:
            code = process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            ended.append(f"rank {rank} did not end within {_ENOUGH_SECONDS:g} s")
            continue
        if code:
            errors[rank].seek(0)
            last = (errors[rank].read().strip().splitlines() or ["no message"])[-1]
            ended.append(f"rank {rank} ended with code {code} ({last[:300]})")
    for process, file in zip(processes, errors, strict=True):
        process.kill()
        process.wait()
        file.close()
    return tuple(ended)


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
