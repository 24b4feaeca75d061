"""Ulysses over two and four real processes (gloo): exact, undone without a trace, refused where it would be wrong."""

from __future__ import annotations

import ast
import functools

import pytest
import torch

import ulysses_bound
import ulysses_groups
import ulysses_models
import ulysses_pieces
import ulysses_refusals
from distributed import run_ranks
from ulysses_ranks import CHECKS
from veomni_core.errors import HostError
from veomni_core.parallel.sequence import apply_ulysses

MODULES = (ulysses_pieces, ulysses_models, ulysses_groups, ulysses_refusals, ulysses_bound)


@functools.cache
def outcomes(processes: int) -> dict[str, str]:
    """What each check said, from one start of the processes for all of them."""
    names = ", ".join(module.__name__ for module in MODULES)
    outputs = run_ranks(f"import {names}, ulysses_ranks; ulysses_ranks.run_all()", processes)
    return dict(ast.literal_eval(line) for line in outputs[0].splitlines() if line.startswith("("))


@pytest.mark.thorough
@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_on_several_processes(processes, name):
    assert outcomes(processes)[name] == ""


def test_without_a_process_group_it_says_what_to_call():
    with pytest.raises(HostError, match=r"call torch\.distributed\.init_process_group\(\) first"):
        apply_ulysses(torch.nn.Linear(1, 1))
