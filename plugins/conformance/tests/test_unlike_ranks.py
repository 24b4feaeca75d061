"""Ranks that are unlike, or that end: all others end with a typed error that says so, without waiting for long."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from distributed import run_ranks
from forked_processes import finish, fork_ranks
from veomni_conformance.ranks.processes import is_running, this_process

BIND = """
    import signal
    from models import build
    from counting_kernels import counting_registry
    from veomni_core import bind, binding_of
    from veomni_core.errors import PlanMismatchError

    rank, model = torch.distributed.get_rank(), build("llama")
    registry, config = counting_registry("one"), {{"preset": "eager", "rms_norm_implementation": "one"}}
    {before}
    try:
        bind(model, config, registry=registry)
    except PlanMismatchError as error:
        assert binding_of(model) is None
        print(error)
"""


def said_where(before: str, processes: int = 2) -> list[str]:
    """What the ranks print where this runs on each of them before ``bind``."""
    return run_ranks(textwrap.dedent(BIND).format(before=before), processes=processes)


@pytest.mark.parametrize(
    ("before", "difference"),
    [
        ("os.environ.update(NVIDIA_TF32_OVERRIDE='1') if rank else None", "NVIDIA_TF32_OVERRIDE: not set -> 1"),
        ("os.environ.update(VEOMNI_PLUGINS=f'veomni-{rank}')", "VEOMNI_PLUGINS: veomni-0 -> veomni-1"),
        (
            "import importlib.metadata as m; v = m.version; "
            "m.version = lambda name: '2.0.0' if rank and name == 'torch' else v(name)",
            "-> 2.0.0",
        ),
    ],
    ids=["a variable of the arithmetic", "which plugins load", "a version"],
)
@pytest.mark.thorough
def test_ranks_under_different_conditions_all_say_so(before: str, difference: str) -> None:
    first, second = said_where(before)
    assert first == second
    assert first.startswith("ranks run under different conditions; against rank 0:\nrank 1: ")
    assert difference in first


def test_another_lock_file_on_one_rank_is_named(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / f"{rank}.lock").write_text(f"{rank}")
    before = f"os.environ.update(VEOMNI_FROZEN={str(tmp_path)!r} + f'/{{{{rank}}}}.lock')"
    for said in said_where(before.replace("{{", "{").replace("}}", "}")):
        assert "rank 1: VEOMNI_FROZEN: a file of sha256 " in said


@pytest.mark.parametrize("victim", [0, 1], ids=["the one that serves the store", "another one"])
def test_a_rank_that_dies_while_it_plans_ends_the_others(victim: int) -> None:
    before = f"""
if rank == {victim}:
    import veomni_core.binding.bind as binding
    binding.make_plan = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
"""
    body = textwrap.dedent(BIND).format(before=before)
    ranks = finish(fork_ranks(_bind, body, processes=3), timeout=100)  # less than the agreement waits
    for rank, each in enumerate(ranks):
        if rank != victim:
            assert f"rank {rank} waits to agree on the plan, but the process of rank {victim} has ended" in each.stdout


def _bind(body: str) -> None:
    import torch

    torch.distributed.init_process_group("gloo")
    exec(compile(body, "body.py", "exec"), {"os": os, "torch": torch})
    sys.stdout.flush()


def test_a_process_that_has_ended_is_seen_before_its_parent_asks() -> None:
    code = "from veomni_conformance.ranks.processes import this_process; print(this_process(), flush=True); input()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin and child.stdout
    name = child.stdout.readline().strip()
    assert is_running(name) and is_running(this_process()) and name != this_process()
    child.stdin.close()
    while is_running(name):  # a zombie now: nobody has waited for it
        time.sleep(0.05)
    child.wait()
    assert not is_running(name)
