"""Runs a function of a test module in several real processes that form one gloo group."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

_RANK_SCRIPT = """
import os, sys
sys.path[:0] = {paths!r}
import torch
torch.set_num_threads(1)
torch.distributed.init_process_group("gloo")
{body}
sys.stdout.flush()
torch.distributed.barrier()
torch.distributed.destroy_process_group()
sys.stdout.flush()
os._exit(0)  # gloo's threads may outlive the interpreter's teardown, which then aborts
"""


def run_ranks(body: str, processes: int = 2, timeout: float = 240.0) -> list[str]:
    """Run ``body`` on every rank; gives each rank's standard output, and raises with its errors if one fails."""
    script = _RANK_SCRIPT.format(paths=[str(Path(__file__).parent)], body=textwrap.dedent(body))
    port = str(29500 + os.getpid() % 2000)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            env={
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(processes),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(processes)
    ]
    try:
        outputs = [rank.communicate(timeout=timeout) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for number, (rank, (_, errors)) in enumerate(zip(ranks, outputs, strict=True)):
        assert rank.returncode == 0, f"rank {number} ended with {rank.returncode}:\n{errors[-4000:]}"
    return [out for out, _ in outputs]
