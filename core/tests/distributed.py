"""Runs a function of a test module in several real processes that form one gloo group."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path


def run_ranks(body: str, processes: int = 2, timeout: float = 240.0) -> list[str]:
    """Run ``body`` on every rank; gives each rank's standard output, and raises with its errors if one fails."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "body.py").write_text(textwrap.dedent(body), encoding="utf-8")
        launcher = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("forked_ranks.py")), folder, str(processes)],
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "WORLD_SIZE": str(processes),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(_free_port()),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # a process group, so that the ranks end with their launcher
        )
        try:
            said, _ = launcher.communicate(timeout=timeout)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(launcher.pid, signal.SIGKILL)
        outputs = [_read(Path(folder) / f"{rank}.out") for rank in range(processes)]
        errors = [_read(Path(folder) / f"{rank}.err")[-4000:] for rank in range(processes)]
    assert launcher.returncode == 0, said + "\n".join(f"rank {rank}:\n{text}" for rank, text in enumerate(errors))
    return outputs


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""
