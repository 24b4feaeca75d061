"""Kimi delta attention, forward and backward: chunked_kda beside transformers' own code and fla's kernel.

    python benchmarks/kda/kda.py

Writes ``docs/benchmarks/kda.json`` and ``.md``. Contenders take turns in several processes. A time is the median over
processes of the median turn; on a CPU with one thread. Memory is the peak of what PyTorch's allocator holds above the
inputs, gradients of the inputs included. fla's kernel is measured where flash-linear-attention is installed, on a GPU.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import statistics
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.models.kimi_linear import modeling_kimi_linear

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's root, for `benchmarks`

from benchmarks.shared.accuracy import hold
from benchmarks.shared.in_processes import Calls, leaf, measured_in_processes, median_seconds
from benchmarks.shared.memory import peak_bytes
from benchmarks.shared.results import machine, write_results
from veomni_core.ops.kda import standard as reference
from veomni_torch import kda

MIB = 1 << 20
EAGER, OURS, FLA = "transformers", "chunked_kda", "fla"


@dataclass(frozen=True)
class Shape:
    """A batch, and the heads of one layer."""

    batch: int
    tokens: int
    heads: int
    width: int
    dtype: torch.dtype

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.batch} x {self.tokens} tokens, {self.heads} heads of {self.width}, {dtype}"


# On a CPU a quarter of Kimi-Linear's heads, and all of them on a GPU.
SHAPES = {
    "cpu": {
        "float32": Shape(1, 2048, 8, 128, torch.float32),
        "bfloat16": Shape(1, 2048, 8, 128, torch.bfloat16),
    },
    "cuda": {"kimi_linear": Shape(2, 4096, 32, 128, torch.bfloat16)},
}
ALLOWED = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # the errors of results, as norms


def contenders(shape: Shape, device: str) -> tuple[Calls, list[Tensor]]:
    """The calls, each giving the sum of the output weighted by a fixed random tensor."""
    options = {"device": device, "dtype": shape.dtype}
    tokens = (shape.batch, shape.tokens, shape.heads)
    query, key, value = (leaf(*tokens, shape.width, **options) for _ in range(3))
    g = (-torch.rand(*tokens, shape.width, device=device) * 0.2).requires_grad_()
    beta = torch.rand(*tokens, **options).requires_grad_()
    inputs = [query, key, value, g, beta]
    functions: dict[str, Any] = {
        EAGER: inspect.unwrap(modeling_kimi_linear.chunk_kimi_delta_attention),
        OURS: kda.standard,
    }
    if device == "cuda" and importlib.util.find_spec("fla"):
        functions[FLA] = importlib.import_module("fla.ops.kda").chunk_kda
    calls = {name: partial(each, *inputs, use_qk_l2norm_in_kernel=True) for name, each in functions.items()}
    with torch.no_grad():
        exact = reference(*(x.double() for x in inputs), use_qk_l2norm_in_kernel=True)[0]
        for name, call in calls.items():
            hold(name, call()[0], exact, ALLOWED[shape.dtype])
    weights = torch.randn(value.shape, **options)

    def total(call: Any) -> Tensor:
        weighted: Tensor = (call()[0] * weights).sum()
        return weighted

    return {name: partial(total, call) for name, call in calls.items()}, inputs


def measure(shape: Shape, device: str, repeats: int) -> dict[str, Any]:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # with more of them, what else the machine does would count for more
    calls, inputs = contenders(shape, device)
    return {
        "shape": str(shape),
        "seconds": median_seconds(calls, inputs, repeats),
        "peak bytes": {name: peak_bytes(call, inputs)["both"] for name, call in calls.items()},
    }


def rows(measured: dict[str, Any]) -> list[tuple[str, ...]]:
    memory, each = measured["peak bytes"], measured["seconds in each process"]

    def row(name: str) -> tuple[str, ...]:
        ratios = [mine / theirs for mine, theirs in zip(each[name], each[EAGER], strict=True)]
        return (
            f"{name}, {measured['shape']}",
            f"{1e3 * measured['seconds'][name]:.1f} ms",
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
            f"{memory[name] / MIB:.1f} MiB",
            f"{memory[name] / memory[EAGER]:.0%}",
        )

    return [row(name) for name in measured["seconds"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=SHAPES, default="cpu")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--name", default="kda", help="of the files in docs/benchmarks")
    parser.add_argument("--shape", help="print one process's figures of this shape as JSON, and write nothing")
    options = parser.parse_args()
    shapes = SHAPES[options.device]
    if options.shape:
        print(json.dumps(measure(shapes[options.shape], options.device, options.repeats)))
        return
    arguments = ["--device", options.device, "--repeats", str(options.repeats)]
    cases = [measured_in_processes(__file__, [*arguments, "--shape", name], options.processes) for name in shapes]
    write_results(
        options.name,
        "Kimi delta attention, forward and backward",
        {"cases": cases, "machine": machine()},
        ("kernel and shape", "time", "of transformers' time", "peak memory", "of transformers' memory"),
        [each for measured in cases for each in rows(measured)],
        "One thread. A ratio is that of the medians of one process, as the median and the range over processes.",
        script=__file__,
    )


if __name__ == "__main__":
    main()
