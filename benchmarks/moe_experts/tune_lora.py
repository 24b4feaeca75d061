"""Times the narrow products of adapters in `fused_triton` over sizes of blocks: the source of their launches.

    python benchmarks/moe_experts/tune_lora.py

The shape is that of `lora.py` on a GPU. Times are of one kernel on operands that are larger than the L2 cache.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from triton.runtime.errors import OutOfResources

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's root, for `benchmarks`

from benchmarks.shared.measuring import timing
from veomni_triton_moe.moe_experts.launch import NarrowLaunch
from veomni_triton_moe.moe_experts.narrow_products import factor_gradient, inner_product
from veomni_triton_moe.moe_experts.routing import route

TOKENS, HIDDEN, INTERMEDIATE, EXPERTS, K, RANK = 8192, 2048, 768, 128, 8, 16
INNER = [
    *(NarrowLaunch(rows, 64, 4, 4) for rows in (32, 64, 128)),
    *(NarrowLaunch(rows, 128, 4, stages) for rows in (32, 64) for stages in (3, 4)),
    NarrowLaunch(128, 64, 8, 4),
]
FACTOR = [
    *(NarrowLaunch(64, 128, 4, stages) for stages in (4, 6)),
    NarrowLaunch(32, 128, 4, 6),
    NarrowLaunch(64, 64, 4, 6),
    NarrowLaunch(64, 256, 8, 4),
    NarrowLaunch(128, 128, 4, 3),
]


def calls() -> Iterator[tuple[str, list[NarrowLaunch], Callable[[NarrowLaunch], object]]]:
    """Name, candidates, and the product as a function of its launch."""
    options = {"device": "cuda", "dtype": torch.bfloat16}
    torch.manual_seed(0)
    index = torch.rand(TOKENS, EXPERTS, device="cuda").topk(K).indices
    routing = route(index, EXPERTS, 128)
    hidden = torch.randn(TOKENS, HIDDEN, **options)
    dpre, weighted = (torch.randn(TOKENS * K, width, **options) for width in (2 * INTERMEDIATE, INTERMEDIATE))
    inner = torch.randn(TOKENS * K, RANK, **options)
    a, b = torch.randn(EXPERTS, RANK, HIDDEN, **options), torch.randn(EXPERTS, HIDDEN, RANK, **options)
    down_a, up_b = (
        torch.randn(EXPERTS, *shape, **options) for shape in ((RANK, INTERMEDIATE), (2 * INTERMEDIATE, RANK))
    )

    def multiply(rows: torch.Tensor, matrices: torch.Tensor, tokens: bool, launch: NarrowLaunch) -> object:
        return inner_product(rows, matrices, RANK, routing, 1.0, tokens, launch)

    def reduce(rows: torch.Tensor, tokens: bool, transposed: bool, launch: NarrowLaunch) -> object:
        return factor_gradient(rows, inner, RANK, routing, None, tokens, transposed, launch)

    yield "inner of tokens, by a", INNER, partial(multiply, hidden, a.mT, True)
    yield "inner of tokens, by b", INNER, partial(multiply, hidden, b, True)
    yield "inner of rows, by a", INNER, partial(multiply, weighted, down_a.mT, False)
    yield "inner of rows, by b", INNER, partial(multiply, dpre, up_b, False)
    yield "factor of tokens, a", FACTOR, partial(reduce, hidden, True, True)
    yield "factor of tokens, b", FACTOR, partial(reduce, hidden, True, False)
    yield "factor of rows, b", FACTOR, partial(reduce, dpre, False, False)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for name, candidates, call in calls():
        for launch in candidates:
            try:
                print(f"{name:24} {timing(partial(call, launch), rep=20).median:.4f} ms {launch}", flush=True)
            except OutOfResources:
                continue


if __name__ == "__main__":
    main()
