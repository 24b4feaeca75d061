"""Times the products of `fused_triton` over sizes of tiles, and prints the best for each: the source of its tables.

    python benchmarks/moe_experts/tune_moe.py [--shapes qwen3-30b-a3b …] [--keep 3]

Every launch is compiled first, in as many processes as there are cores, on a tiny problem of the same alignment.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's root, for `benchmarks`

from benchmarks.moe_experts.problems import SHAPES, Problem, Shape
from benchmarks.shared.measuring import timing
from veomni_triton_moe.moe_experts.activation import Activation
from veomni_triton_moe.moe_experts.gate_up import gate_up_product
from veomni_triton_moe.moe_experts.launch import Launch
from veomni_triton_moe.moe_experts.routing import Routing, route
from veomni_triton_moe.moe_experts.row_product import row_product
from veomni_triton_moe.moe_experts.weight_gradients import weight_gradient

GROUPS = (4, 8, 16)
CANDIDATES = {
    "gate_up": [
        *(Launch(128, 128, 64, group, 8, stages) for group in GROUPS for stages in (3, 4)),
        *(Launch(64, 128, 64, group, warps, stages) for group in GROUPS for warps in (4, 8) for stages in (3, 4)),
        *(Launch(64, 64, 64, group, 4, stages) for group in GROUPS for stages in (3, 4)),
    ],
    "rows": [
        *(Launch(128, 256, 64, group, 8, 3) for group in GROUPS),
        *(Launch(64, 256, 64, group, warps, stages) for group in GROUPS for warps in (4, 8) for stages in (3, 4)),
        *(Launch(64, 128, 64, group, 4, stages) for group in GROUPS for stages in (3, 4)),
    ],
    "weights": [
        *(Launch(128, 256, 64, group, 8, 3) for group in GROUPS),
        *(Launch(128, 256, 32, group, 8, 5, halved_store=halved) for group in GROUPS for halved in (False, True)),
        *(Launch(128, 128, 32, group, 4, s, p, True) for group in GROUPS for s, p in ((3, 3), (5, 2), (6, 2))),
        *(Launch(64, 128, 32, group, 4, 3, 5, True) for group in GROUPS),
    ],
}
TINY = Shape(tokens=64, hidden=512, intermediate=256, experts=4, k=2)


class Products:
    """Every product of a step, on operands of one shape."""

    def __init__(self, shape: Shape) -> None:
        self.shape, self.problem = shape, Problem(shape)
        rows = shape.tokens * shape.k
        self.wide, self.pre, self.inner = (
            torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)
            for width in (shape.hidden, 2 * shape.intermediate, shape.intermediate)
        )
        self._routings: dict[int, Routing] = {}

    def routing(self, block_m: int) -> Routing:
        """The routing with tiles of ``block_m`` rows."""
        if block_m not in self._routings:
            self._routings[block_m] = route(self.problem.index, self.shape.experts, block_m)
        return self._routings[block_m]

    def calls(self) -> Iterator[tuple[str, str, float, Callable[[Launch], object]]]:
        """Name, table, useful work, and the product as a function of its launch."""
        hidden, gate_up, down = (t.detach() for t in (self.problem.hidden, self.problem.gate_up, self.problem.down))
        work = self.shape.forward_flop / 3

        def up(launch: Launch) -> object:
            return gate_up_product(hidden, gate_up, None, self.routing(launch.block_m), Activation(), launch, True)

        def rows(source: Tensor, matrices: Tensor, launch: Launch) -> object:
            return row_product(source, matrices, self.routing(launch.block_m), launch, True)

        def weights(left: Tensor, right: Tensor, launch: Launch) -> object:
            return weight_gradient(left, right, self.routing(128), launch, True)

        yield "gate_up", "gate_up", 2 * work, up
        yield "down", "rows", work, partial(rows, self.inner, down.mT)
        yield "dactivation", "rows", work, partial(rows, self.wide, down)
        yield "dhidden", "rows", 2 * work, partial(rows, self.pre, gate_up)
        yield "ddown", "weights", work, partial(weights, self.wide, self.inner)
        yield "dgate_up", "weights", 2 * work, partial(weights, self.pre, self.wide)


def compile_launch(table: str, launch: Launch) -> None:
    """Run the products of ``table`` once with ``launch``, which leaves them in the compiler's cache."""
    for _, its_table, _, call in Products(TINY).calls():
        if its_table == table:
            try:
                call(launch)
            except OutOfResources:
                return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--keep", type=int, default=4)
    options = parser.parse_args()
    jobs = [(table, launch) for table, launches in CANDIDATES.items() for launch in launches]
    with multiprocessing.get_context("spawn").Pool() as pool:
        pool.starmap(compile_launch, jobs, chunksize=1)
    for name in options.shapes:
        for product, table, flop, call in Products(SHAPES[name]).calls():
            times = []
            for launch in CANDIDATES[table]:
                try:
                    times.append((timing(partial(call, launch), rep=40).median, launch))
                except OutOfResources:
                    continue
            for time, launch in itertools.islice(sorted(times, key=lambda pair: pair[0]), options.keep):
                print(f"{name:26} {product:12} {time:.3f} ms {flop / time / 1e9:4.0f} TFLOP/s {launch}", flush=True)


if __name__ == "__main__":
    main()
