"""Compares kernels that are bound by memory with their peers on a GPU: the command line and the measuring."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from torch import Tensor

from benchmarks.shared.benchmark import Benchmark
from benchmarks.shared.ceilings import copy_gb_per_second
from benchmarks.shared.measuring import Call, captured, timing, training_step
from benchmarks.shared.memory import peak_mib_of_step
from benchmarks.shared.results import machine, write_results

COLUMNS = (
    "shape",
    "kernel",
    "forward ms",
    "forward+backward ms (20 to 80 %)",
    "GB/s",
    "as a CUDA graph, ms",
    "GB/s as a graph",
    "peak MiB",
)


def options(description: str | None) -> argparse.Namespace:
    """What the command line that these benchmarks share was given."""
    return parser(description).parse_args()


def parser(description: str | None) -> argparse.ArgumentParser:
    """The command line that these benchmarks share."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--tune", action="store_true", help="time our kernels over launch parameters instead")
    parser.add_argument("--only", nargs="*", metavar="NAME", help="these contenders alone")
    parser.add_argument("--name", help="the result file to write; none without it")
    return parser


def measure(
    name: str,
    shape: str,
    forward: Call,
    backward: Callable[[Any], None],
    inputs: Sequence[Tensor],
    traffic: int,
) -> dict[str, Any]:
    """Times and memory of one contender; ``traffic`` is the bytes that both passes must move."""
    both = training_step(forward, backward, inputs)
    peak = peak_mib_of_step(both, inputs)
    times = {"forward": timing(forward), "both": timing(both)}
    if replay := captured(both):
        times["graph"] = timing(replay)
    found = {"name": name, "shape": shape, "traffic": traffic, "peak MiB": peak}
    print(f"{shape} {name}: {', '.join(f'{what} {time}' for what, time in times.items())}, {peak:.0f} MiB", flush=True)
    return found | {what: asdict(time) for what, time in times.items()}


def benchmark(
    shapes: Mapping[str, Any],
    compare: Callable[[Any, Collection[str] | None], Iterable[dict[str, Any]]],
    ours: tuple[str, ...],
) -> Benchmark:
    """What a script on a GPU says of itself.

    Args:
        shapes: by name.
        compare: for a shape and the names of contenders, or ``None`` for all, gives what :func:`measure` found of each.
        ours: the contenders that are kernels of this repository.
    """

    def measure(shape: Any, device: str, repeats: int, only: Collection[str] | None = None) -> dict[str, Any]:
        found = list(compare(shape, only))
        return {
            "seconds": {each["name"]: each["both"]["median"] / 1e3 for each in found},
            "seconds as a graph": {each["name"]: each["graph"]["median"] / 1e3 for each in found if "graph" in each},
            "peak bytes": {each["name"]: {"both": round(each["peak MiB"] * 2**20)} for each in found},
        }

    return Benchmark({"cuda": shapes}, measure, ours)


def fastest(what: str, candidates: Iterable[tuple[Any, Call]], keep: int = 5) -> None:
    """Time candidates of one kernel and print the best."""
    times = [(timing(call, rep=30), launch) for launch, call in candidates]
    for time, launch in sorted(times, key=lambda pair: pair[0].median)[:keep]:
        print(f"{what} {time}  {launch}", flush=True)


def write(name: str | None, title: str, figures: Sequence[dict[str, Any]], script: str) -> None:
    """The result file, if named, with the GPU in its title; ``script`` is the ``__file__`` of what measured."""
    copy = copy_gb_per_second()
    print(f"a copy runs at {copy:.0f} GB/s")
    if name:
        data = {"machine": machine(), "copy GB/s": copy, "figures": list(figures)}
        # "NVIDIA H100 80GB HBM3" is an H100.
        write_file(name, f"{title}, {data['machine']['gpu'].split()[1]}", data, script)


def write_file(name: str, title: str, data: dict[str, Any], script: str) -> None:
    """``benchmarks/results/<name>.json`` of what was measured."""
    write_results(name, title, data, COLUMNS, [_row(found) for found in data["figures"]], script=script)


def _row(found: dict[str, Any]) -> tuple[str, ...]:
    both = found["both"]
    return (
        found["shape"],
        found["name"],
        f"{found['forward']['median']:.3f}",
        f"{both['median']:.3f} ({both['low']:.3f} to {both['high']:.3f})",
        _gb_per_second(found, both),
        *((f"{graph['median']:.3f}", _gb_per_second(found, graph)) if (graph := found.get("graph")) else ("", "")),
        f"{found['peak MiB']:.0f}" if "peak MiB" in found else "",
    )


def _gb_per_second(found: dict[str, Any], time: dict[str, float]) -> str:
    return f"{found['traffic'] / time['median'] / 1e6:.0f}"


def selected(contenders: dict[str, Any], only: Collection[str] | None) -> dict[str, Any]:
    """The contenders that the command line asks for."""
    return {name: contender for name, contender in contenders.items() if not only or name in only}
