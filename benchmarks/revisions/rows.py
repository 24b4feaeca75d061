"""One line for each kernel and shape that was measured at two revisions: what it took, and what that says."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.revisions.turns import Figure, Runs
from benchmarks.revisions.verdict import FEWEST_PAIRS, Ratio, Verdict, ratio

COLUMNS = (
    *("benchmark", "kernel", "shape", "base", "head"),
    *("time: head / base", "as a graph: head / base", "memory: base / head", "memory: head / base", "verdict"),
)
_MIB = 1 << 20


@dataclass(frozen=True)
class Row:
    """A kernel at a shape; without ratios where a revision lacks it."""

    benchmark: str
    kernel: str
    shape: str
    base: list[Figure]
    head: list[Figure]
    base_lacks: str = ""

    @property
    def ratios(self) -> dict[str, Ratio]:
        """Of the time, of the time as a CUDA graph where both revisions have one, and of the memory."""
        if not (self.base and self.head):
            return {}
        found = {"time": ratio([each.seconds for each in self.base], [each.seconds for each in self.head])}
        of_graphs = [[each.graph_seconds for each in figures] for figures in (self.base, self.head)]
        base, head = ([each for each in seconds if each is not None] for seconds in of_graphs)
        if (len(base), len(head)) == (len(self.base), len(self.head)):
            found["graph"] = ratio(base, head)
        found["memory"] = ratio([each.peak_bytes for each in self.base], [each.peak_bytes for each in self.head])
        return found

    @property
    def losses(self) -> dict[str, Ratio]:
        return {what: found for what, found in self.ratios.items() if found.verdict is Verdict.LOSS}

    @property
    def verdict(self) -> str:
        """In words, with what to do if it is unclear."""
        if not self.base:
            return f"new: {self.base_lacks or 'the base has no such kernel or shape'}"
        if not self.head:
            return "gone: the head has no such kernel or shape"
        said = []
        for what, found in self.ratios.items():
            if found.verdict is Verdict.UNCLEAR:
                pairs = FEWEST_PAIRS if found.pairs < FEWEST_PAIRS else 2 * found.pairs
                said.append(f"{what} unclear, more pairs needed: --pairs {pairs}")
            elif found.verdict is not Verdict.SAME:
                said.append(f"{what}: {found.verdict.value}")
        return "; ".join(said) or Verdict.SAME.value

    def cells(self) -> tuple[str, ...]:
        """In the order of ``COLUMNS``."""
        both = self.ratios
        memory = " / ".join(_mib(figures) for figures in (self.base, self.head))
        time, graph, peak = (str(both.get(what, "")) for what in ("time", "graph", "memory"))
        times = _time(self.base), _time(self.head), time, graph
        return self.benchmark, self.kernel, self.shape, *times, memory, peak, self.verdict


def rows(benchmark: str, runs: Runs) -> Iterator[Row]:
    """Every kernel and shape that a process measured, in the order of the first one."""
    measured = [*runs.base, *runs.head]
    for kernel, shape in dict.fromkeys(key for figures in measured for key in figures):
        of_base, of_head = (
            [figures[kernel, shape] for figures in each if (kernel, shape) in figures]
            for each in (runs.base, runs.head)
        )
        yield Row(benchmark, kernel, shape, of_base, of_head, runs.base_lacks)


def _time(figures: list[Figure]) -> str:
    return f"{1e3 * statistics.median(each.seconds for each in figures):.3f} ms" if figures else "-"


def _mib(figures: list[Figure]) -> str:
    return f"{statistics.median(each.peak_bytes for each in figures) / _MIB:.1f} MiB" if figures else "-"
