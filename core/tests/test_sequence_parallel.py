"""Ulysses over two and four real processes (gloo): exact, undone without a trace, refused where it would be wrong."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

from distributed import run_ranks

CHECKS = re.findall(r"@check\ndef (\w+)", (Path(__file__).parent / "sequence_parallel_checks.py").read_text())


@functools.cache
def outcomes(processes: int) -> dict[str, str]:
    """What each check said, from one start of the processes for all of them."""
    outputs = run_ranks("import sequence_parallel_checks; sequence_parallel_checks.run_all()", processes)
    return dict(ast.literal_eval(line) for line in outputs[0].splitlines() if line.startswith("("))


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize("processes", [2, 4])
def test_on_several_processes(processes, name):
    assert outcomes(processes)[name] == ""
