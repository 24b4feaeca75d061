"""Runs benchmarks at two revisions, in fresh processes that take turns."""

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
    graph_seconds: float | None = None  # of a CUDA graph, where the kernel can be captured


Figures = dict[tuple[str, str], Figure]  # by the kernel and the shape


class Lacks(str):
    """Why the revision has no such kernel."""


class NotMeasured(str):
    """The end of what a benchmark that failed printed."""


@dataclass
class Runs:
    """The figures of each pair of processes, or what the base lacks."""

    base: list[Figures] = field(default_factory=list)
    head: list[Figures] = field(default_factory=list)
    base_lacks: str = ""


Measure = Callable[[Sequence[Guarded]], dict[Guarded, Figures | Lacks | NotMeasured]]


def in_turns(
    of_base: Measure, of_head: Measure, asked: Sequence[Guarded], pairs: int
) -> dict[Guarded, Runs | NotMeasured]:
    """Measure both in pairs: base and head, head and base, and so on, so that what drifts meets both alike.

    Where the base lacks the kernels, the head is measured once, for their names. What fails is not tried again.
    """
    found: dict[Guarded, Runs | NotMeasured] = {each: Runs() for each in asked}
    turns = [("base", of_base), ("head", of_head)]
    for _ in range(pairs):
        for which, measure in turns:
            left = [each for each, runs in found.items() if isinstance(runs, Runs) and not runs.base_lacks]
            for each, figures in measure(left).items() if left else ():
                if isinstance(figures, Lacks):
                    of_names = of_head([each])[each]
                    found[each] = of_names if isinstance(of_names, NotMeasured) else Runs([], [of_names], figures)
                elif isinstance(figures, NotMeasured):
                    found[each] = figures
                else:
                    getattr(found[each], which).append(figures)
        turns.reverse()
    return found


@dataclass
class OneProcess:
    """Measures benchmarks at a revision in a fresh process, each time that it is called.

    Attributes:
        which: ``"base"`` or ``"head"``.
        packages_of: the revision's files.
        scripts: the folder of the scripts. It is the head's for both revisions, which then measure the same.
        options: of ``one_process``: shapes and repeats.
        own: the benchmarks that the revision measures by its own script, since it lacks what the head's imports: a
            commit that renames what only a benchmark imports is no reason not to compare.
    """

    which: str
    packages_of: Path
    scripts: Path
    options: Sequence[str] = ()
    own: set[Guarded] = field(default_factory=set)

    def __call__(self, asked: Sequence[Guarded]) -> dict[Guarded, Figures | Lacks | NotMeasured]:
        """What one process found of each; all are measured on the device of the first."""
        print(f"{', '.join(map(str, asked))}: {self.which}", file=sys.stderr, flush=True)
        paths = {str(self._script(each)): each for each in asked}
        options = ["--device", asked[0].device, "--ours", "--packages-of", str(self.packages_of), *self.options]
        command = [sys.executable, "-m", "benchmarks.shared.one_process", *paths, *options]
        result = subprocess.run(command, env=_environment(self.packages_of), cwd=_HERE, capture_output=True, text=True)
        lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith('{"script": ')]
        printed = {paths[line["script"]]: line for line in lines}
        end = [*result.stdout.splitlines()[-3:], *result.stderr.splitlines()[-8:]]
        return {each: self._read(each, printed.get(each, {"failed": "\n".join(end)}), len(asked)) for each in asked}

    def _read(self, each: Guarded, printed: dict[str, Any], together: int) -> Figures | Lacks | NotMeasured:
        if "figures" in printed:
            return dict(_figures(printed["figures"]))
        if together > 1:  # what another of them imported or broke may be why
            return self([each])[each]
        if "failed" in printed or self.which == "head":  # a broken import, since its own benchmark asks for it
            return NotMeasured(f"the {self.which} failed\n{printed.get('failed') or printed['lacks']}")
        if each in self.own or not (self.packages_of / "benchmarks" / each.script).is_file():
            return Lacks(printed["lacks"])
        print(f"{each}: the {self.which} is measured by its own script, since: {printed['lacks']}", flush=True)
        self.own.add(each)
        return self([each])[each]

    def _script(self, each: Guarded) -> Path:
        return (self.packages_of if each in self.own else self.scripts) / "benchmarks" / each.script


def _environment(packages_of: Path) -> dict[str, str]:
    """Python's path before what is installed: editable installs are looked up last."""
    path = [*package_folders(packages_of), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, **KEEP_FREED_MEMORY, "PYTHONPATH": os.pathsep.join(map(str, path))}


def _figures(printed: dict[str, Any]) -> Iterable[tuple[tuple[str, str], Figure]]:
    for shape, found in printed.items():
        of_graphs = found.get("seconds as a graph", {})
        for kernel, seconds in found["seconds"].items():
            yield (kernel, shape), Figure(seconds, found["peak bytes"][kernel]["both"], of_graphs.get(kernel))
