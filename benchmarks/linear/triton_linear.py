"""Batch-invariant products beside torch's (cuBLAS) on a GPU, bf16, forward as a CUDA graph.

    python benchmarks/linear/triton_linear.py --name linear_h100
    python benchmarks/linear/triton_linear.py --tune

First a row's bits are compared: alone, and among other rows of every number that is timed. A time is the median of
``triton.testing.do_bench``, with a cold cache; a graph leaves out what Python's launches take.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, astuple
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's root, for `benchmarks`

from benchmarks.shared import memory_bound
from benchmarks.shared.measuring import Timing, captured, timing, training_step
from benchmarks.shared.memory import peak_mib_of_step
from benchmarks.shared.results import machine, write_results
from veomni_triton import linear
from veomni_triton.linear.launches import Launch

WIDTHS = ((2048, 2048), (2048, 8192), (8192, 2048), (2048, 128256))  # of a Llama of the 1B shape
ROWS = (1, 16, 64, 256, 2048, 8192)
OURS, THEIRS = "veomni triton", "torch"
KERNELS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {OURS: linear.standard, THEIRS: F.linear}


def drawn(rows: int, width: int, outputs: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    sizes = ((rows, width), (outputs, width))
    x, weight = (torch.randn(size, device="cuda", dtype=torch.bfloat16, generator=generator) for size in sizes)
    return x, weight


def timed(kernel: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor) -> Timing:
    with torch.no_grad():
        return timing(captured(lambda: kernel(x, weight)) or (lambda: kernel(x, weight)), rep=60)


def figures() -> Iterator[dict[str, Any]]:
    for width, outputs in WIDTHS:
        everything, weight = drawn(max(ROWS), width, outputs)
        alone = linear.standard(everything[:1], weight)
        for rows in ROWS:
            x = everything[:rows].contiguous()
            if not torch.equal(linear.standard(x, weight)[:1], alone):
                raise SystemExit(f"{rows} rows of {width}: the first has other bits than alone")
            times = {name: timed(kernel, x, weight) for name, kernel in KERNELS.items()}
            print(rows, width, outputs, {name: str(time) for name, time in times.items()}, flush=True)
            yield {
                "rows": rows,
                "widths": f"{width} to {outputs}",
                "ms": {name: asdict(time) for name, time in times.items()},
                "TFLOP/s": {name: 2e-9 * rows * width * outputs / time.median for name, time in times.items()},
            }


def compare_at(widths: tuple[int, int], only: Collection[str] | None) -> Iterator[dict[str, Any]]:
    """Forward and backward of 2048 rows, as two revisions are compared."""
    inputs = [each.requires_grad_() for each in drawn(2048, *widths)]
    for name, kernel in memory_bound.selected(KERNELS, only).items():
        upstream = torch.ones_like(kernel(*inputs))
        both = training_step(partial(kernel, *inputs), partial(torch.autograd.backward, grad_tensors=upstream), inputs)
        yield {"name": name, "both": asdict(timing(both)), "peak MiB": peak_mib_of_step(both, inputs)}


SHAPES = {f"2048 rows, {width} to {outputs}": (width, outputs) for width, outputs in WIDTHS}
BENCHMARK = memory_bound.benchmark(SHAPES, compare_at, ours=(OURS,))

FEW = (  # rows of a tile, columns, columns that are summed at a time, warps, and the depth of the loop's pipeline
    *((64, 16, 64, 4, 8), (64, 16, 128, 4, 6), (64, 16, 128, 4, 8), (64, 16, 256, 4, 4), (64, 32, 128, 4, 4)),
    *((64, 32, 128, 4, 6), (64, 32, 128, 4, 8), (64, 64, 64, 4, 8), (64, 64, 128, 4, 3), (64, 64, 128, 4, 4)),
)
MANY = (
    *((64, 64, 64, 4, 6), (64, 128, 64, 4, 4), (64, 128, 64, 4, 6), (64, 128, 128, 4, 3), (64, 256, 64, 4, 4)),
    *((128, 64, 64, 4, 4), (128, 64, 128, 4, 3), (128, 128, 64, 4, 3), (128, 128, 64, 4, 4), (128, 128, 64, 8, 4)),
    *((128, 256, 64, 8, 3), (128, 256, 64, 8, 4)),
)


def tune() -> None:
    """Print the six fastest launches for each number of rows and widths."""
    launches = [Launch(*sizes, described) for sizes in FEW + MANY for described in (False, True)]
    for rows, (width, outputs) in itertools.product((1, 64, 256, 512, 2048, 4096, 8192), WIDTHS):
        if rows > 64 and outputs > 1 << 16:
            continue
        x, weight = drawn(rows, width, outputs)
        wanted, found = linear.standard(x, weight), []
        for launch in launches:
            if rows > 512 and launch.rows * launch.columns < 64 * 128:
                continue
            kernel = partial(linear.product, bias=None, launch=launch)
            try:
                if not torch.equal(kernel(x, weight), wanted):
                    print(f"{launch}: other bits", flush=True)
                found.append((timed(kernel, x, weight).median, astuple(launch)))
            except Exception as error:  # mostly too much shared memory
                print(f"{rows} {launch}: {type(error).__name__}", flush=True)
        best = "; ".join(f"{took:.4f} {sizes}" for took, sizes in sorted(found)[:6])
        torchs = timed(F.linear, x, weight).median
        print(f"{rows} rows, {width} to {outputs}, torch {torchs:.4f}: {best}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--name", help="the result file to write; none without it")
    options = parser.parse_args()
    if options.tune:
        tune()
        return
    found = list(figures())
    if options.name:
        columns = ("widths", "rows", f"{OURS}, ms", f"{THEIRS}, ms", "TFLOP/s", "of torch's speed")
        rows = (
            (
                each["widths"],
                str(each["rows"]),
                *(f"{each['ms'][name]['median']:.4f}" for name in KERNELS),
                f"{each['TFLOP/s'][OURS]:.0f}",
                f"{each['ms'][THEIRS]['median'] / each['ms'][OURS]['median']:.2f}",
            )
            for each in found
        )
        title = "Batch-invariant products, bf16, forward"
        write_results(options.name, title, {"machine": machine(), "figures": found}, columns, rows, script=__file__)


if __name__ == "__main__":
    main()
