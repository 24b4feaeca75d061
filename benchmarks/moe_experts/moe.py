"""Mixture-of-experts MLPs on one GPU: our kernels against transformers, veomni-torch, Liger and SonicMoE.

    python benchmarks/moe_experts/moe.py [--shapes qwen3-30b-a3b …] [--skip "Liger fused MoE" …] [--name moe_h200]

Every contender runs in one process on the same tensors. Its result and gradients are compared first with the contract's
reference in float64. TFLOP/s counts the useful work, 18·T·K·H·I for forward and backward. Peak memory is what a step
takes beyond its inputs, the gradients that it leaves among it. Writes ``benchmarks/results/<name>.json``.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's root, for `benchmarks`

from benchmarks.moe_experts.contenders import Kernel, contenders
from benchmarks.moe_experts.problems import SHAPES, Problem, Shape
from benchmarks.shared import memory_bound
from benchmarks.shared.accuracy import relative_error
from benchmarks.shared.ceilings import copy_gb_per_second, product_tflop_per_second
from benchmarks.shared.gpu_kernels import launches
from benchmarks.shared.measuring import timing, training_step
from benchmarks.shared.memory import peak_mib, saved_mib
from benchmarks.shared.results import machine, write_results


def errors(kernel: Kernel, problem: Problem, exact: dict[str, Tensor]) -> dict[str, float]:
    """How far the result and each gradient are from float64."""
    problem.forget_gradients()
    result = kernel(*problem.arguments())
    gradients = torch.autograd.grad(result, list(problem.leaves.values()), problem.upstream)
    found = dict(zip(("result", *problem.leaves), (result.detach(), *gradients), strict=True))
    return {name: relative_error(value, exact[name]) for name, value in found.items()}


def measure(kernel: Kernel, shape: Shape, problem: Problem, exact: dict[str, Tensor]) -> dict[str, Any]:
    """Everything that is said of one contender at one shape."""

    def forward() -> Tensor:
        return kernel(*problem.arguments())

    def backward(result: Tensor) -> None:
        result.backward(problem.upstream)

    def later_step() -> None:
        backward(forward())

    wrong = errors(kernel, problem, exact)
    step = training_step(forward, backward, problem.leaves.values())
    both, alone = timing(step), timing(forward)
    found = {
        "forward ms": asdict(alone),
        "forward TFLOP/s": shape.forward_flop / alone.median / 1e9,
        "step ms": asdict(both),
        "step TFLOP/s": 3 * shape.forward_flop / both.median / 1e9,
        "later step ms": asdict(timing(later_step)),
        "later peak MiB": peak_mib(later_step),
        "saved MiB": saved_mib(forward),
        "launches": launches(step),
        "errors": wrong,
    }
    problem.forget_gradients()
    return {**found, "peak MiB": peak_mib(step)}


def row(shape: str, name: str, found: dict[str, Any], ceiling: float) -> tuple[str, ...]:
    """One line of the table."""
    step = found["step ms"]
    return (
        shape,
        name,
        f"{found['forward TFLOP/s']:.0f}",
        f"{found['step TFLOP/s']:.0f}",
        f"{found['step TFLOP/s'] / ceiling:.0%}",
        f"{step['median']:.2f} ({step['low']:.2f} to {step['high']:.2f})",
        f"{found['later step ms']['median']:.2f}",
        f"{found['peak MiB']:.0f}",
        f"{found['later peak MiB']:.0f}",
        f"{found['saved MiB']:.0f}",
        str(found["launches"]),
        f"{found['errors']['result']:.1e}",
        f"{max(error for what, error in found['errors'].items() if what != 'result'):.1e}",
    )


COLUMNS = (
    "shape",
    "kernel",
    "forward TFLOP/s",
    "forward+backward TFLOP/s",
    "of the product ceiling",
    "step ms (20 to 80 %)",
    "later step ms",
)
MEMORY_COLUMNS = (
    "peak MiB",
    "later peak MiB",
    "saved MiB",
    "launches",
    "error of the result",
    "largest error of a gradient",
)


def ceilings() -> dict[str, float]:
    """What this GPU can do, in this run."""
    return {"product TFLOP/s": product_tflop_per_second(), "copy GB/s": copy_gb_per_second()}


def measure_shape(shape_name: str, kernels: Sequence[tuple[str, Kernel]]) -> Iterator[dict[str, Any]]:
    """Every contender at one shape, after each what there is; one that fails says why, and the others are measured."""
    shape = SHAPES[shape_name]
    problem = Problem(shape)
    exact = problem.exact()
    results: dict[str, Any] = {}
    for name, kernel in kernels:
        gc.collect()
        torch.cuda.empty_cache()
        try:
            results[name] = measure(kernel, shape, problem, exact)
            print(f"{shape_name}: {name}: {results[name]['step TFLOP/s']:.0f} TFLOP/s", flush=True)
        except Exception as error:
            results[name] = {"failed": f"{type(error).__name__}: {error}"}
            print(f"{shape_name}: {name} failed: {type(error).__name__}: {str(error)[:200]}", flush=True)
        yield {"shape": asdict(shape), "kernels": results}


def write(name: str, data: dict[str, Any]) -> None:
    """The result file of what has been measured so far."""
    ceiling = data["ceilings"]["product TFLOP/s"]
    rows = [
        row(shape_name, kernel, found, ceiling)
        for shape_name, results in data["shapes"].items()
        for kernel, found in results["kernels"].items()
        if "failed" not in found
    ]
    notes = [f"Not run: {', '.join(data['skipped'])}."] if data["skipped"] else []
    notes += [
        f"{shape_name}, {kernel}: {found['failed']}"
        for shape_name, results in data["shapes"].items()
        for kernel, found in results["kernels"].items()
        if "failed" in found
    ]
    columns = (*COLUMNS, *MEMORY_COLUMNS)
    write_results(name, "Mixture-of-experts MLPs, bf16", data, columns, rows, "\n".join(notes), script=__file__)


def compare(shape: Shape, only: Collection[str] | None) -> Iterator[dict[str, Any]]:
    """The contenders that are asked for, as they are compared at two revisions; one that fails stops it."""
    problem = Problem(shape)
    exact = problem.exact()
    for name, kernel in contenders():
        if only is None or name in only:
            found = measure(kernel, shape, problem, exact)
            yield {"name": name, "both": found["step ms"], "peak MiB": found["peak MiB"]}


FUSED = "veomni fused_triton"
OURS = (FUSED, f"{FUSED}, recomputing", f"{FUSED}, accumulating", "veomni grouped_mm", "veomni fused_quack")
BENCHMARK = memory_bound.benchmark(SHAPES, compare, OURS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--skip", nargs="*", default=[], help="contenders to leave out, by their names")
    parser.add_argument("--name", default="moe_h200")
    options = parser.parse_args()
    data: dict[str, Any] = {"machine": machine(), "ceilings": ceilings(), "shapes": {}, "skipped": options.skip}
    kernels = [(name, kernel) for name, kernel in contenders() if name not in options.skip]
    for shape_name in options.shapes:
        for found in measure_shape(shape_name, kernels):  # SonicMoE may search for minutes: a cut-off loses only that
            data["shapes"][shape_name] = found
            write(options.name, data)


if __name__ == "__main__":
    main()
