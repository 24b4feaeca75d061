"""Runs one benchmark at two revisions, in fresh processes that take turns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.revisions.selection import Guarded
from benchmarks.shared.one_process import KEEP_FREED_MEMORY, package_folders

_HERE = Path(__file__).resolve().parents[2]  # where `benchmarks` is imported from, whatever is measured


@dataclass(frozen=True)
class Figure:
    """What one kernel took at one shape, in one process."""

    seconds: float
    peak_bytes: int


Figures = dict[tuple[str, str], Figure]  # by the kernel and the shape


class Lacks(Exception):
    """The revision has no such kernel."""


class NotMeasured(Exception):
    """The benchmark failed; the message is the end of what it printed."""


@dataclass
class Runs:
    """The figures of each pair of processes, or what the base lacks."""

    base: list[Figures] = field(default_factory=list)
    head: list[Figures] = field(default_factory=list)
    base_lacks: str = ""


def in_turns(of_base: Callable[[], Figures], of_head: Callable[[], Figures], pairs: int) -> Runs:
    """Measure both in pairs: base and head, head and base, and so on, so that what drifts meets both alike.

    Where the base lacks the kernels, the head is measured once, for their names.
    """
    runs = Runs()
    turns = [(of_base, runs.base), (of_head, runs.head)]
    for _ in range(pairs):
        for measure, figures in turns:
            try:
                figures.append(measure())
            except Lacks as error:
                return Runs(head=[of_head()], base_lacks=str(error))
        turns.reverse()
    return runs


@dataclass
class OneProcess:
    """Measures a revision in a fresh process, each time that it is called.

    Attributes:
        guarded: what is measured.
        which: ``"base"`` or ``"head"``.
        packages_of: the revision's files.
        script: the benchmark. It is the head's for both, so that both are asked the same.
        own_script: the revision's own, which takes its place if the revision lacks what ``script`` imports: a commit
            that renames what only a benchmark imports is no reason not to compare.
        shapes: their names; all if there are none.
        repeats: turns of the process.
    """

    guarded: Guarded
    which: str
    packages_of: Path
    script: Path
    own_script: Path
    shapes: Sequence[str] = ()
    repeats: int | None = None

    def __call__(self) -> Figures:
        """The figures of one process.

        Raises:
            Lacks: the base has no such package, module or name of ours as its benchmark asks for.
            NotMeasured: the process failed for another reason.
        """
        print(f"{self.guarded}: {self.which}", file=sys.stderr, flush=True)
        asked = ["--device", self.guarded.device, "--ours", "--packages-of", str(self.packages_of)]
        asked += ["--repeats", str(self.repeats)] if self.repeats else []
        asked += ["--shapes", *self.shapes] if self.shapes else []
        command = [sys.executable, "-m", "benchmarks.shared.one_process", str(self.script), *asked]
        result = subprocess.run(command, env=_environment(self.packages_of), cwd=_HERE, capture_output=True, text=True)
        if result.returncode:
            end = [*result.stdout.splitlines()[-3:], *result.stderr.splitlines()[-8:]]
            raise NotMeasured("\n".join([f"the {self.which} failed", *end]))
        printed = json.loads(result.stdout.splitlines()[-1])
        if "lacks" not in printed:
            return dict(_read(printed["figures"]))
        if self.which == "head":  # a broken import, since its own benchmark asks for it
            raise NotMeasured(f"the head failed\n{printed['lacks']}")
        if self.script == self.own_script or not self.own_script.is_file():
            raise Lacks(printed["lacks"])
        print(f"{self.guarded}: the {self.which} is measured by its own script, since: {printed['lacks']}", flush=True)
        self.script = self.own_script
        return self()


def _environment(packages_of: Path) -> dict[str, str]:
    """Python's path before what is installed: editable installs are looked up last."""
    path = [*package_folders(packages_of), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, **KEEP_FREED_MEMORY, "PYTHONPATH": os.pathsep.join(map(str, path))}


def _read(printed: dict[str, Any]) -> Iterable[tuple[tuple[str, str], Figure]]:
    for shape, found in printed.items():
        for kernel, seconds in found["seconds"].items():
            yield (kernel, shape), Figure(seconds, found["peak bytes"][kernel]["both"])
