"""Times `fused_quack`'s products over QuACK's configurations for this GPU, and prints the best of each.

    python benchmarks/moe_experts/tune_quack.py [--shapes qwen3-30b-a3b …] [--products gated …] [--keep 3]

Only the configurations that QuACK lists for the GPU and that can gather are tried, each once: a search that ends. What
the kernels use, and QuACK's default, are printed with them. Most of the time goes into compiling, which QuACK keeps on
disk.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from quack.gemm_config import get_all_configs
from quack.gemm_interface import default_config

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's root, for `benchmarks`

from benchmarks.moe_experts.problems import SHAPES, Problem, Shape
from benchmarks.shared.measuring import timing
from veomni_quack.moe_experts import grouped_gemm
from veomni_quack.moe_experts.routing import route
from veomni_quack.moe_experts.token_sums import rows_with_a_zero

PRODUCTS = ("gated", "down", "gated_backward", "down gradient", "hidden gradient", "gate_up gradient")


def products(shape: Shape) -> Iterator[tuple[str, float, Callable[[], Any]]]:
    """Name, useful work and call of every product of a step."""
    problem = Problem(shape)
    hidden, gate_up, down = (tensor.detach() for tensor in (problem.hidden, problem.gate_up, problem.down))
    routing = route(problem.index, shape.experts)
    offsets, token = routing.offsets, routing.token_of_row
    weights = routing.of_rows(problem.weights.detach()).float()
    upstream, count = problem.upstream, shape.tokens * shape.k
    pre, activated = grouped_gemm.gated(hidden, gate_up, offsets, token)
    dpre = torch.randn_like(pre)
    out = rows_with_a_zero(count, like=hidden)[:count]
    dgate_up, ddown = torch.empty_like(gate_up), torch.empty_like(down)
    work = shape.forward_flop / 3
    calls: tuple[tuple[float, Callable[[], Any]], ...] = (
        (2 * work, lambda: grouped_gemm.gated(hidden, gate_up, offsets, token)),
        (work, lambda: grouped_gemm.rows(activated, down.mT, offsets, out, interleaved=False)),
        (work, lambda: grouped_gemm.gated_backward(upstream, down, pre, weights, offsets, token)),
        (work, lambda: grouped_gemm.gradient(upstream, activated, offsets, token, out=ddown, interleaved=False)),
        (2 * work, lambda: grouped_gemm.rows(dpre, gate_up, offsets, out, interleaved=True)),
        (2 * work, lambda: grouped_gemm.gradient(hidden, dpre, offsets, token, out=dgate_up.mT, interleaved=True)),
    )
    for name, (flop, call) in zip(PRODUCTS, calls, strict=True):
        yield name, flop, call


def configurations(product: str) -> list[Any]:
    """QuACK's list for this GPU, less what grouped products can't take; the default first."""
    default = default_config(torch.device("cuda"))
    epilogue = {"gated": "gated", "gated_backward": "dgated"}.get(product)
    listed = [
        config
        for config in get_all_configs(epilogue)
        if config.device_capacity == default.device_capacity
        and config.cluster_n == 1
        and not config.swap_ab
        and not config.use_tma_gather
    ]
    wider = [replace(config, max_swizzle_size=16) for config in (default,)]
    return list(dict.fromkeys([default, *listed, *wider]))


def tune(product: str, flop: float, call: Callable[[], Any], keep: int) -> None:
    """Print the speed of what is in use, the default's, and the fastest configurations'."""
    time = timing(call, rep=50)
    print(f"{product}: in use {flop / time.median / 1e9:.0f} TFLOP/s, {time}", flush=True)
    found = []
    for config in configurations(product):
        grouped_gemm._configuration = lambda operand, config=config, **_: config
        try:
            time = timing(call, rep=50)
        except Exception as error:
            print(f"{product}: {config} failed: {type(error).__name__}: {str(error)[:100]}", flush=True)
            continue
        found.append((flop / time.median / 1e9, time, config))
    if not found:
        return
    print(f"{product}: default {found[0][0]:.0f} TFLOP/s, {found[0][1]}", flush=True)
    for speed, time, config in sorted(found, key=lambda each: -each[0])[:keep]:
        print(f"{product}: {speed:.0f} TFLOP/s, {time}  {config}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["qwen3-30b-a3b"], choices=list(SHAPES))
    parser.add_argument("--products", nargs="+", default=list(PRODUCTS), choices=PRODUCTS)
    parser.add_argument("--keep", type=int, default=3)
    options = parser.parse_args()
    own = grouped_gemm._configuration
    for shape in options.shapes:
        print(shape)
        for product, flop, call in products(SHAPES[shape]):
            if product in options.products:
                tune(product, flop, call, options.keep)
                grouped_gemm._configuration = own


if __name__ == "__main__":
    main()
