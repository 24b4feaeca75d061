"""A repository with one kernel and its benchmark, which reads its figures off the kernel."""

from __future__ import annotations

import subprocess
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KERNEL = "plugins/stub/src/veomni_stub/kda.py"
SCRIPT = "benchmarks/kda/kda.py"
MEASURES = """
    from benchmarks.shared.benchmark import Benchmark
    from veomni_stub import kda
    from veomni_stub.kda import {names}


    def measure(shape, device, repeats, only=None):
        return {{
            "seconds": {{"{kernel}": shape * kda.SECONDS}},
            "seconds as a graph": {{"{kernel}": each for each in [kda.GRAPH] if each}},
            "peak bytes": {{"{kernel}": {{"both": kda.BYTES}}}},
        }}


    BENCHMARK = Benchmark({{"cpu": {{"small": 1, "large": 100}}}}, measure, ours=("{kernel}",))
"""


class Repository:
    """A repository with one kernel and its benchmark."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.git("init", "--quiet")
        self.write("plugins/stub/src/veomni_stub/__init__.py", "")
        self.measures()

    def git(self, *arguments: str) -> None:
        who = ("-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
        subprocess.run(["git", *who, *arguments], cwd=self.folder, check=True)

    def write(self, path: str, text: str) -> None:
        (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / path).write_text(textwrap.dedent(text).lstrip(), encoding="utf-8")

    def kernel(self, seconds: float = 0.01, size: int = 1 << 20, more: str = "", graph: float | None = None) -> None:
        self.write(KERNEL, f"SECONDS, BYTES, GRAPH = {seconds}, {size}, {graph}\n{more}\n")

    def measures(self, names: str = "SECONDS", kernel: str = "stub") -> None:
        self.write(SCRIPT, MEASURES.format(names=names, kernel=kernel))

    def commit(self) -> None:
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", "A revision", "--allow-empty")
