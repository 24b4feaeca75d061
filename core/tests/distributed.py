"""Runs a piece of code in several real processes that form one gloo group."""

from __future__ import annotations

import json
import os
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from filelock import FileLock

from forked_processes import finish, fork_ranks


def once_for_all_workers(factory: pytest.TempPathFactory, name: str, make: Callable[[], Any]) -> Any:
    """What ``make`` gives, which JSON can hold: one of pytest-xdist's workers calls it, and the others read it.

    Args:
        factory: pytest's fixture of folders.
        name: what tells it from what other calls of this function give.
    """
    folder = factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    kept = folder / f"{name}.json"
    with FileLock(kept.with_suffix(".lock")):
        if not kept.exists():
            kept.write_text(json.dumps(make()), encoding="utf-8")
    return json.loads(kept.read_text(encoding="utf-8"))


def run_ranks(body: str, processes: int = 2, timeout: float = 240.0) -> list[str]:
    """Run ``body`` on every rank; gives each rank's standard output, and raises with all errors if one fails.

    ``os``, ``sys`` and ``torch`` are imported for it.
    """
    ranks = finish(fork_ranks(_run, textwrap.dedent(body), processes=processes), timeout)
    failed = [f"rank {rank} ended with {each.returncode}:\n{each.stderr[-4000:]}" for rank, each in enumerate(ranks)]
    assert not any(each.returncode for each in ranks), "\n".join(failed)
    return [each.stdout for each in ranks]


def _run(body: str) -> None:
    torch.distributed.init_process_group("gloo")
    exec(compile(body, "body.py", "exec"), {"__name__": "__main__", "os": os, "sys": sys, "torch": torch})
    sys.stdout.flush()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
