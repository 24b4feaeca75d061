"""Log-probabilities and entropies of tokens, forward and backward: our kernels beside TRL's function and all logits.

    python benchmarks/token_logprobs/token_logprobs.py --device cuda --name token_logprobs_h200

Writes ``benchmarks/results/token_logprobs.json``. Contenders take turns in several processes. A time is
the median over processes of the median turn. Memory is the peak of what PyTorch's allocator holds above the inputs,
gradients of the inputs included; what it is beyond them stands beside it. "All logits" is the op's reference, which
is what an unbound model computes. "Products alone" are the four matrix products of a kernel that keeps no logits, in
tiles of the same sizes as Triton's: two of each tile's logits, and those of the gradients.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from trl.kernels.chunked_logprob import ChunkedLogProbFunction

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's root, for `benchmarks`

from benchmarks.shared.accuracy import hold
from benchmarks.shared.benchmark import Benchmark
from benchmarks.shared.in_processes import Calls, asked, figures, leaf, measured_in_processes
from benchmarks.shared.measuring import seconds_in_turns
from benchmarks.shared.results import machine, write_results
from veomni_ops.token_logprobs import causal as reference
from veomni_torch import token_logprobs

MIB = 1 << 20
THEIRS, OURS, ALL, PRODUCTS = "TRL", "chunk_logprobs", "all logits", "products alone"
OUTPUTS = ("logprobs", "entropy")
TRL_CHUNK = 32768  # words, as TRL's trainers call it


@dataclass(frozen=True)
class Shape:
    """A batch of tokens, and a head."""

    tokens: int
    hidden: int
    vocabulary: int
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"T={self.tokens} H={self.hidden} V={self.vocabulary}"


# Llama 2's vocabulary on a CPU; Qwen3's and Llama 3's on a GPU.
SHAPES = {
    "cpu": {"all": Shape(2048, 256, 32000, torch.float32)},
    "cuda": {
        "qwen3": Shape(8192, 2048, 151936, torch.bfloat16),
        "llama3": Shape(8192, 4096, 131072, torch.bfloat16),
    },
}
KEPT_MIB = (0, 512)  # what Triton's kernel keeps: nothing, and as it is set unless a job says otherwise
TRITON = "triton, {} MiB kept"
ALLOWED = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # the errors of results, as norms


def contenders(shape: Shape, device: str, only: Collection[str] | None) -> tuple[Calls, list[Tensor]]:
    """The calls, each giving the sum of the log-probabilities and of a tenth of the entropies: both have gradients."""
    options = {"device": device, "dtype": shape.dtype}
    hidden = leaf(shape.tokens, shape.hidden, **options)
    weight = leaf(shape.vocabulary, shape.hidden, scale=shape.hidden**-0.5, **options)
    labels = torch.randint(shape.vocabulary, (shape.tokens,), device=device)

    def of_trl() -> tuple[Tensor, ...]:
        found = ChunkedLogProbFunction.apply(
            hidden, weight, None, labels, 1.0, TRL_CHUNK, None, 1.0, ("log_probs", "entropy")
        )
        return found[0], found[1]

    results: dict[str, Any] = {
        ALL: lambda: reference(hidden, weight, labels, outputs=OUTPUTS),
        THEIRS: of_trl,
        OURS: lambda: token_logprobs.causal(hidden, weight, labels, outputs=OUTPUTS),
    }
    if device == "cuda":
        results |= _of_triton(hidden, weight, labels)
    results = asked(results, only)
    few = slice(0, 64)  # of all tokens, whose float64 logits fit
    with torch.no_grad():
        exact = reference(hidden[few].double(), weight.double(), labels[few], outputs=OUTPUTS)
        for name, call in results.items():
            for found, wanted in zip(call(), exact, strict=True):
                hold(name, found[few], wanted, ALLOWED[shape.dtype])

    def learned(call: Any) -> Tensor:
        logprobs, entropy = call()
        total: Tensor = logprobs.sum() + 0.1 * entropy.sum()
        return total

    return {name: partial(learned, call) for name, call in results.items()}, [hidden, weight]


def _of_triton(hidden: Tensor, weight: Tensor, labels: Tensor) -> dict[str, Any]:
    from veomni_triton import token_logprobs as kernels

    def call(kept_mib: int) -> Any:
        kernel = kernels.causal(kept_mib)
        return lambda: kernel(hidden, weight, labels, outputs=OUTPUTS)

    return {TRITON.format(kept): call(kept) for kept in KEPT_MIB}


def products_alone(shape: Shape, repeats: int) -> float:
    """The median seconds of the matrix products."""
    from veomni_triton.token_logprobs.tiles import Tiles

    options = {"device": "cuda", "dtype": shape.dtype}
    hidden, weight = (torch.randn(rows, shape.hidden, **options) for rows in (shape.tokens, shape.vocabulary))
    tiles = Tiles.of(hidden, shape.vocabulary, 0)
    logits, total = torch.empty(shape.tokens, tiles.words, **options), torch.zeros_like(hidden, dtype=torch.float32)
    dweight = torch.empty_like(weight)

    def products() -> None:
        for words in tiles:
            tile = logits.view(-1)[: shape.tokens * (words.stop - words.start)].view(shape.tokens, -1)
            torch.mm(hidden, weight[words].t(), out=tile)
            torch.mm(hidden, weight[words].t(), out=tile)
            torch.addmm(total, tile, weight[words], out_dtype=torch.float32, out=total)
            torch.mm(tile.t(), hidden, out=dweight[words])

    times = seconds_in_turns({PRODUCTS: products}, repeats, wait=torch.cuda.synchronize)
    return statistics.median(times[PRODUCTS])


def measure(shape: Shape, device: str, repeats: int, only: Collection[str] | None = None) -> dict[str, Any]:
    torch.manual_seed(0)
    calls, inputs = contenders(shape, device, only)
    found = figures(calls, inputs, repeats)
    if device == "cuda" and (only is None or PRODUCTS in only):
        found["seconds"][PRODUCTS] = products_alone(shape, repeats)
    return {
        "shape": str(shape),
        **found,
        "bytes of gradients": sum(each.numel() * each.element_size() for each in inputs),
    }


BENCHMARK = Benchmark(SHAPES, measure, ours=(OURS, *(TRITON.format(kept) for kept in KEPT_MIB)))


def rows(measured: dict[str, Any]) -> list[tuple[str, ...]]:
    memory = {name: peak["both"] for name, peak in measured["peak bytes"].items()}
    each = measured["seconds in each process"]

    def row(name: str) -> tuple[str, ...]:
        ratios = [mine / theirs for mine, theirs in zip(each[name], each[THEIRS], strict=True)]
        time = (
            f"{name}, {measured['shape']}",
            f"{1e3 * measured['seconds'][name]:.1f} ms",
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
        )
        if name not in memory:
            return *time, "-", "-", "-"
        beyond = memory[name] - measured["bytes of gradients"]
        return *time, f"{memory[name] / MIB:.1f} MiB", f"{beyond / MIB:.1f} MiB", f"{memory[name] / memory[THEIRS]:.0%}"

    return [row(name) for name in measured["seconds"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=SHAPES, default="cpu")
    parser.add_argument("--repeats", type=int, default=BENCHMARK.repeats)
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument("--name", default="token_logprobs", help="of the result file")
    options = parser.parse_args()
    shapes = SHAPES[options.device]
    cases = [
        measured_in_processes(__file__, options.device, name, options.repeats, options.processes) for name in shapes
    ]
    dtype = str(next(iter(shapes.values())).dtype).removeprefix("torch.")
    write_results(
        options.name,
        f"Log-probabilities with entropy, forward and backward, in {dtype}",
        {"cases": cases, "machine": machine()},
        ("kernel and shape", "time", "of TRL's time", "peak memory", "beyond gradients", "of TRL's memory"),
        [each for measured in cases for each in rows(measured)],
        script=__file__,
    )


if __name__ == "__main__":
    main()
