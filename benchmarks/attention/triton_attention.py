"""Batch-invariant attention beside torch's on a GPU: causal, bf16, forward and backward.

    python benchmarks/attention/triton_attention.py --name triton_attention_h200
    python benchmarks/attention/triton_attention.py --tune

``--tune`` prints the times of each kernel's launches, fastest first. Other processes compile them before.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's root, for `benchmarks`

from benchmarks.attention.flops import causal_flops
from benchmarks.shared import memory_bound
from benchmarks.shared.accuracy import relative_error
from benchmarks.shared.measuring import timing
from benchmarks.shared.memory import peak_mib_of_step
from benchmarks.shared.results import machine, write_results
from veomni_ops.attention import AttentionModule
from veomni_triton import attention
from veomni_triton.attention import operators
from veomni_triton.attention_launches import Launch

OURS, THEIRS = "veomni triton", "sdpa"
COLUMNS = ("shape", "kernel", "forward ms", "both ms", "TFLOP/s", "of torch's speed")
WORKERS = 12
# By the name of a launch: queries (rows of a tile), keys, warps, and the depth of the loop's pipeline.
CANDIDATES: dict[str, list[tuple[int, ...]]] = {
    "FORWARD": [
        *itertools.product((128,), (64, 128), (8,), (2, 3)),
        *itertools.product((64,), (64, 128), (4,), (2, 3)),
        *itertools.product((128,), (64,), (4,), (2, 3)),
    ],
    "DQUERY": [
        *itertools.product((128,), (64, 128), (8,), (2, 3)),
        *itertools.product((64,), (32, 64, 128), (4,), (2, 3)),
        (128, 64, 4, 2),
    ],
    "DKEYS": [
        *itertools.product((32, 64, 128), (128,), (8,), (2,)),
        *itertools.product((32, 64), (64,), (4,), (2, 3)),
        *itertools.product((32, 64), (128,), (4,), (2,)),
        *((64, 128, 8, 3), (128, 64, 4, 2), (64, 64, 8, 2)),
    ],
}


@dataclass(frozen=True)
class Shape:
    """Rows of a batch, positions, heads, key heads, and the width of a head."""

    batch: int
    length: int
    heads: int
    groups: int
    width: int

    def __str__(self) -> str:
        return f"B={self.batch} S={self.length} heads {self.heads}/{self.groups} of {self.width}"

    @property
    def forward_flops(self) -> float:
        return causal_flops([self.length] * self.batch, self.heads, self.width) / 3.5

    def drawn(self) -> list[Tensor]:
        """Query, key, value and the gradient of the output, as projections give them."""
        generator = torch.Generator("cuda").manual_seed(0)
        heads = (self.heads, self.groups, self.groups, self.heads)
        shapes = [(self.batch, self.length, count, self.width) for count in heads]
        made = [torch.randn(shape, device="cuda", generator=generator).bfloat16() for shape in shapes]
        return [*(each.transpose(1, 2).requires_grad_() for each in made[:3]), made[3]]


SHAPES = (Shape(4, 4096, 32, 8, 64), Shape(4, 4096, 32, 4, 128), Shape(1, 16384, 32, 8, 64))
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def calls(shape: Shape) -> dict[str, Attention]:
    module = AttentionModule(shape.heads // shape.groups)
    causal = partial(scaled_dot_product_attention, is_causal=True, enable_gqa=True)
    return {
        OURS: lambda *heads: attention.attention(module, *heads, None)[0],
        THEIRS: lambda *heads: causal(*heads).transpose(1, 2),
    }


def step(call: Attention, heads: list[Tensor], upstream: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(call(*heads), heads, upstream)


def figures(shape: Shape) -> dict[str, Any]:
    *heads, upstream = shape.drawn()
    found: dict[str, Any] = {"shape": str(shape)}
    results = {}
    for name, call in calls(shape).items():
        with torch.no_grad():
            forward = timing(partial(call, *heads))
        both = timing(partial(step, call, heads, upstream))
        found[name] = {"forward": asdict(forward), "both": asdict(both)}
        results[name] = (call(*heads).detach(), *step(call, heads, upstream))
    off = max(relative_error(mine, own) for mine, own in zip(*results.values(), strict=True))
    if not off < 2e-2:
        raise SystemExit(f"{shape}: off by {off:.1e} of torch's")
    return {**found, "off": off}


def compare_at(shape: Shape, only: Collection[str] | None) -> Iterator[dict[str, Any]]:
    """The chosen contenders at one shape, as two revisions are compared."""
    *heads, upstream = shape.drawn()
    for name, call in memory_bound.selected(calls(shape), only).items():
        both = partial(step, call, heads, upstream)
        yield {"name": name, "both": asdict(timing(both)), "peak MiB": peak_mib_of_step(both, heads)}


BENCHMARK = memory_bound.benchmark({str(shape): shape for shape in SHAPES}, compare_at, ours=(OURS,))


def launched(shape: Shape, which: str, sizes: tuple[int, ...], timed: bool) -> tuple[float, float]:
    """Milliseconds of forward or backward with a launch, and how far its results are from the usual launch's."""
    *heads, upstream = shape.drawn()
    call = calls(shape)[OURS]
    output = call(*heads)
    backward = partial(torch.autograd.grad, output, heads, upstream, retain_graph=True)
    run = (lambda: (call(*heads).detach(),)) if which == "FORWARD" else backward
    wanted = run()
    with patch.dict(getattr(operators, which), {shape.width: Launch(*sizes)}):
        off = max(relative_error(mine, usual) for mine, usual in zip(run(), wanted, strict=True))
        return (timing(run, 60).median if timed else 0.0), off


def compiled(job: tuple[Shape, str, tuple[int, ...]]) -> str:
    """Compile a launch; why it can't be, if it can't."""
    try:
        launched(*job, timed=False)
    except Exception as error:  # mostly too much shared memory
        return f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"
    return ""


def tune(shapes: Iterable[Shape]) -> None:
    jobs = [(shape, which, sizes) for shape in shapes for which, grid in CANDIDATES.items() for sizes in grid]
    with ProcessPoolExecutor(WORKERS, multiprocessing.get_context("spawn")) as pool:
        problems = dict(zip(jobs, pool.map(compiled, jobs), strict=True))
    times: dict[tuple[Shape, str], list[tuple[float, tuple[int, ...]]]] = {}
    for job in jobs:
        shape, which, sizes = job
        if problems[job]:
            print(f"{shape} {which} {sizes}: {problems[job]}", flush=True)
            continue
        took, off = launched(*job, timed=True)
        if not off < 2e-2:
            print(f"{shape} {which} {sizes}: off by {off:.1e}", flush=True)
            continue
        times.setdefault((shape, which), []).append((took, sizes))
    for (shape, which), found in times.items():
        best = "; ".join(f"{took:.3f} {sizes}" for took, sizes in sorted(found)[:8])
        print(f"{shape.width} {which}, {shape}: {best}", flush=True)


def table(figures: Iterable[dict[str, Any]]) -> Iterable[tuple[str, ...]]:
    for shape, found in zip(SHAPES, figures, strict=True):
        for name in (OURS, THEIRS):
            forward, both = (found[name][what]["median"] for what in ("forward", "both"))
            rate = 3.5 * shape.forward_flops / both / 1e9
            speed = found[THEIRS]["both"]["median"] / both
            yield str(shape), name, f"{forward:.2f}", f"{both:.2f}", f"{rate:.0f}", f"{speed:.2f}"


def write(name: str, data: dict[str, Any]) -> None:
    rows = list(table(data["figures"]))
    write_results(name, "Batch-invariant attention, causal, bf16", data, COLUMNS, rows, script=__file__)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--name", help="the result file to write; none without it")
    options = parser.parse_args()
    if options.tune:
        tune(SHAPES[:2])
        return
    found = [figures(shape) for shape in SHAPES]
    for row in table(found):
        print(*row, flush=True)
    if options.name:
        write(options.name, {"machine": machine(), "figures": found})


if __name__ == "__main__":
    main()
