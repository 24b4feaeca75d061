"""Compares kernels with transformers' own code in several processes: the command line, the measuring and the page."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.shared.in_processes import Calls, measured_in_processes, median_seconds
from benchmarks.shared.memory import peak_bytes
from benchmarks.shared.results import machine, write_results

EAGER = "transformers"
Contenders = Callable[[Any, str], tuple[Calls, list[Tensor]]]
_MIB = 1 << 20
_COLUMNS = ("kernel and shape", "time", "of transformers' time", "peak memory", "of transformers' memory")


def main(
    script: str,
    description: str | None,
    title: str,
    shapes: Mapping[str, Mapping[str, Any]],
    contenders: Contenders,
    repeats: int = 5,
    processes: int = 5,
    threads: int | None = None,
) -> None:
    """Measure every shape of a device, and write the page.

    Args:
        script: the ``__file__`` of what measures; without its suffix, the name of the page.
        description: its docstring.
        title: of the page.
        shapes: by device, and there by a name that the command line takes.
        contenders: for a shape and a device, the calls by name, :data:`EAGER` among them, each of which gives a scalar
            to go backward from; and the inputs that get gradients.
        repeats: turns of each process.
        processes: how many there are.
        threads: of a CPU; ``None`` for as many as torch takes.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=shapes, default="cpu")
    parser.add_argument("--repeats", type=int, default=repeats)
    parser.add_argument("--processes", type=int, default=processes)
    parser.add_argument("--name", default=Path(script).stem, help="of the files in docs/benchmarks")
    parser.add_argument("--shape", help="print one process's figures of this shape as JSON, and write nothing")
    options = parser.parse_args()
    if options.shape:
        if threads:
            torch.set_num_threads(threads)
        print(json.dumps(_measured(shapes[options.device][options.shape], options, contenders)))
        return
    arguments = ["--device", options.device, "--repeats", str(options.repeats)]
    cases = [
        measured_in_processes(script, [*arguments, "--shape", name], options.processes)
        for name in shapes[options.device]
    ]
    note = "A ratio is that of the medians of one process, as the median and the range over processes."
    write_results(
        options.name,
        title,
        {"cases": cases, "machine": machine()},
        _COLUMNS,
        [row for case in cases for row in _rows(case)],
        f"One thread. {note}" if threads == 1 else note,
        script=script,
    )


def _measured(shape: Any, options: argparse.Namespace, contenders: Contenders) -> dict[str, Any]:
    torch.manual_seed(0)
    calls, inputs = contenders(shape, options.device)
    return {
        "shape": str(shape),
        "seconds": median_seconds(calls, inputs, options.repeats),
        "peak bytes": {name: peak_bytes(call, inputs)["both"] for name, call in calls.items()},
    }


def _rows(case: dict[str, Any]) -> list[tuple[str, ...]]:
    memory, each = case["peak bytes"], case["seconds in each process"]

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
