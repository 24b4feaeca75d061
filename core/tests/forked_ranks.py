"""Forks the ranks of a test from one process that has imported torch and transformers: an import costs four seconds.

Called by ``distributed.run_ranks`` with a folder and the number of ranks. Each rank runs the folder's ``body.py``, for
which ``os``, ``sys`` and ``torch`` are imported, and writes what it prints to ``<rank>.out`` and ``<rank>.err``.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from pathlib import Path

import torch
import transformers

import veomni_core
import veomni_core.build

LAST_WORDS = 30.0  # seconds in which the other ranks may end by themselves after one has failed

_IMPORTED = (transformers, veomni_core)


def main(folder: Path, processes: int) -> int:
    torch.set_num_threads(1)
    # Compiled here, once. Nothing has computed yet: a fork of a process with busy threads may hang.
    code = compile((folder / "body.py").read_text(encoding="utf-8"), "body.py", "exec")
    running = {_fork(folder, rank, code): rank for rank in range(processes)}
    failed: dict[int, int] = {}
    until = float("inf")
    while running and time.monotonic() < until:
        process, status = os.waitpid(-1, os.WNOHANG)
        if process == 0:
            time.sleep(0.02)
            continue
        rank = running.pop(process)
        if status:
            failed[rank] = os.waitstatus_to_exitcode(status)
            until = min(until, time.monotonic() + LAST_WORDS)
    print(*(f"rank {rank} ended with {code}" for rank, code in failed.items()), sep="\n", flush=True)
    return 1 if failed else 0


def _fork(folder: Path, rank: int, code: object) -> int:
    """Start one rank; returns its process."""
    process = os.fork()
    if process:
        return process
    for name, descriptor in (("out", 1), ("err", 2)):
        opened = os.open(folder / f"{rank}.{name}", os.O_WRONLY | os.O_CREAT)
        os.dup2(opened, descriptor)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    ended = 1
    try:
        torch.distributed.init_process_group("gloo")
        exec(code, {"__name__": "__main__", "os": os, "sys": sys, "torch": torch})  # type: ignore[call-overload]
        sys.stdout.flush()
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
        ended = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(ended)  # gloo's threads may outlive the interpreter's teardown, which then aborts


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
