"""Compares kernels with transformers' own code in several processes: the command line and the measuring."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.shared.benchmark import Benchmark
from benchmarks.shared.in_processes import Calls, figures, measured_in_processes
from benchmarks.shared.results import machine, write_results

EAGER = "transformers"
Contenders = Callable[[Any, str, Collection[str] | None], tuple[Calls, list[Tensor]]]
_MIB = 1 << 20
_COLUMNS = ("kernel and shape", "time", "of transformers' time", "peak memory", "of transformers' memory")


def benchmark(
    shapes: Mapping[str, Mapping[str, Any]],
    contenders: Contenders,
    ours: tuple[str, ...],
    repeats: int = 5,
    threads: int | None = None,
) -> Benchmark:
    """The benchmark of kernels beside transformers' code.

    Args:
        shapes: by device, and there by a name that the command line takes.
        contenders: for a shape, a device and the names that are asked for, or ``None`` for all, the calls by name,
            each of which gives a scalar to go backward from; and the inputs that get gradients. :data:`EAGER` is one.
        ours: the calls that are kernels of this repository.
        repeats: turns of each process.
        threads: of a CPU; ``None`` for as many as torch takes.
    """

    def measure(shape: Any, device: str, repeats: int, only: Collection[str] | None = None) -> dict[str, Any]:
        torch.manual_seed(0)
        return {"shape": str(shape), **figures(*contenders(shape, device, only), repeats)}

    return Benchmark(shapes, measure, ours, repeats, threads)


def main(script: str, description: str | None, title: str, measured: Benchmark, processes: int = 5) -> None:
    """Measure every shape of a device, and write the result file.

    Args:
        script: the ``__file__`` of what measures; without its suffix, the name of the result file.
        description: its docstring.
        title: of the table.
        measured: its :func:`benchmark`.
        processes: how many there are.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=measured.shapes, default="cpu")
    parser.add_argument("--repeats", type=int, default=measured.repeats)
    parser.add_argument("--processes", type=int, default=processes)
    parser.add_argument("--name", default=Path(script).stem, help="of the result file")
    options = parser.parse_args()
    cases = [
        measured_in_processes(script, options.device, name, options.repeats, options.processes)
        for name in measured.shapes[options.device]
    ]
    write_results(
        options.name,
        title,
        {"cases": cases, "machine": machine()},
        _COLUMNS,
        [row for case in cases for row in _rows(case)],
        script=script,
    )


def _rows(case: dict[str, Any]) -> list[tuple[str, ...]]:
    memory = {name: peak["both"] for name, peak in case["peak bytes"].items()}
    each = case["seconds in each process"]

    def row(name: str) -> tuple[str, ...]:
        ratios = [mine / theirs for mine, theirs in zip(each[name], each[EAGER], strict=True)]
        return (
            f"{name}, {case['shape']}",
            f"{1e3 * case['seconds'][name]:.1f} ms",
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
            f"{memory[name] / _MIB:.1f} MiB",
            f"{memory[name] / memory[EAGER]:.0%}",
        )

    return [row(name) for name in case["seconds"]]
