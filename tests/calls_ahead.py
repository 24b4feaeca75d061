"""Compiles what a plugin's kernels launch for layers of real models' widths, for GPUs that are not here.

The plugin's ``compile_ahead.py`` lists the calls, and is run in a process of its own, since the other tests run in
Triton's interpreter. It writes one line of JSON for each call: its problem, and what its functions need.

The contract's samples are small, and ``veomni verify --compile-for`` compiles those. Launches for many rows and wide
layers are chosen here alone. No tensor is computed: what the kernels would write stays as it was allocated.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from veomni_conformance.triton_ahead import compiling_for
from veomni_conformance.triton_targets import Target
from veomni_core.descriptions.hardware import Hardware

Call = Callable[[], Tensor]


class MeasuredOnce(Target):
    """A GPU that is asked for the registers of one function alone.

    ptxas says them when it assembles a function again, which took a quarter of the time. Triton had it assemble each
    one already, and no test reads the numbers of these.
    """

    def resources(self, kernel: Any) -> tuple[int, int]:
        if self not in _MEASURED:
            _MEASURED[self] = super().resources(kernel)
        return _MEASURED[self]


_MEASURED: dict[Target, tuple[int, int]] = {}


def compile_calls(
    calls: Callable[[torch.dtype], Iterator[tuple[str, Call]]], dtype: str, gpu: str, wanted: str = ""
) -> None:
    """Compile the calls whose names match ``wanted``; each gives one tensor that wants gradients."""
    for name, call in calls(getattr(torch, dtype)):
        if not re.search(wanted, name):
            continue
        problem = ""
        with compiling_for(MeasuredOnce.of(Hardware.named(gpu))) as compiled:
            try:
                result = call()
                result.backward(torch.empty_like(result))
            except Exception as error:  # the compiler's: each call is reported
                problem = f"{type(error).__name__}: {error}"
        functions = [asdict(each) for each in dict.fromkeys(compiled)]
        print(json.dumps({"gpu": gpu, "call": name, "problem": problem, "functions": functions}), flush=True)


def assert_compiled(script: Path, gpu: str, dtype: str, wanted: str, least: int, cache: Path) -> list[Any]:
    """Run ``script``, and raise unless its calls, ``least`` or more, compile and fit ``gpu``; what it says of each."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(cache),
    }
    run = subprocess.run(
        [sys.executable, script, dtype, gpu, wanted], capture_output=True, text=True, env=environment, check=False
    )
    assert run.returncode == 0, run.stderr
    rows = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(rows) >= least and all(row["functions"] for row in rows)
    assert not {row["call"]: row["problem"] for row in rows if row["problem"]}
    lacking = [(row["call"], each["name"], each["problem"]) for row in rows for each in row["functions"]]
    assert not [each for each in lacking if each[2]]
    return rows
