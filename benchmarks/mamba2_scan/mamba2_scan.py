"""Mamba 2's scan, forward and backward: chunked_scan beside transformers' own code and mamba-ssm's kernel.

    python benchmarks/mamba2_scan/mamba2_scan.py

Writes ``benchmarks/results/mamba2_scan.json``. Contenders take turns in several processes. A time is the
median over processes of the median turn. Memory is the peak of what PyTorch's allocator holds above the inputs,
gradients of the inputs included. mamba-ssm's kernel is measured where it is installed, on a GPU.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.models.bamba import modeling_bamba

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's root, for `benchmarks`

from benchmarks.shared.accuracy import hold
from benchmarks.shared.beside_transformers import EAGER, benchmark, main
from benchmarks.shared.in_processes import Calls, asked, leaf
from veomni_ops.mamba2_scan import standard as reference
from veomni_torch import mamba2_scan

OURS, PACKAGE = "chunked_scan", "mamba-ssm"


@dataclass(frozen=True)
class Shape:
    """A batch, the heads of one layer, and the length of transformers' chunks."""

    batch: int
    tokens: int
    heads: int
    groups: int
    widths: tuple[int, int]
    chunk: int
    dtype: torch.dtype

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        heads = f"{self.heads} heads of {self.widths[0]}, states of {self.widths[1]}"
        return f"{self.batch} x {self.tokens} tokens, {heads}, transformers' chunks of {self.chunk}, {dtype}"


# On a CPU an eighth of Bamba's heads with its chunks of 256, and an eighth of Nemotron-H's with its chunks of 128. All
# of Bamba's on a GPU.
SHAPES = {
    "cpu": {
        "float32": Shape(1, 2048, 16, 1, (64, 128), 256, torch.float32),
        "bfloat16": Shape(1, 2048, 16, 1, (64, 128), 256, torch.bfloat16),
        "nemotron_h": Shape(1, 2048, 16, 1, (64, 128), 128, torch.float32),
    },
    "cuda": {"bamba": Shape(2, 4096, 128, 1, (64, 128), 256, torch.bfloat16)},
}
ALLOWED = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # the errors of results, as norms


def contenders(shape: Shape, device: str, only: Collection[str] | None) -> tuple[Calls, list[Tensor]]:
    """The calls, each giving the sum of the output weighted by a fixed random tensor."""
    options = {"device": device, "dtype": shape.dtype}
    tokens, (width, state) = (shape.batch, shape.tokens), shape.widths
    x, dt = leaf(*tokens, shape.heads, width, **options), leaf(*tokens, shape.heads, **options)
    A = (-torch.arange(1.0, shape.heads + 1, device=device)).requires_grad_()
    B, C = (leaf(*tokens, shape.groups, state, **options) for _ in range(2))
    D, bias = leaf(shape.heads, **options), torch.full((shape.heads,), -4.0, **options).requires_grad_()
    inputs = [x, dt, A, B, C, D, bias]
    own = inspect.unwrap(modeling_bamba.mamba2_chunk_scan)
    named = {"D": D, "dt_bias": bias, "dt_softplus": True}
    calls: dict[str, Any] = {
        EAGER: partial(own, x, dt, A, B, C, chunk_size=shape.chunk, **named),
        OURS: lambda: mamba2_scan.standard(x, dt, A, B, C, **named)[0],
    }
    if device == "cuda" and importlib.util.find_spec("mamba_ssm"):
        package = importlib.import_module("mamba_ssm.ops.triton.ssd_combined").mamba_chunk_scan_combined
        calls[PACKAGE] = partial(package, x, dt, A, B, C, chunk_size=shape.chunk, **named)
    calls = asked(calls, only)
    with torch.no_grad():
        wide = {name: each.double() if isinstance(each, Tensor) else each for name, each in named.items()}
        exact = reference(*(each.double() for each in (x, dt, A, B, C)), **wide)[0]
        for name, call in calls.items():
            hold(name, call(), exact, ALLOWED[shape.dtype])
    weights = torch.randn(x.shape, device=device)

    def total(call: Any) -> Tensor:
        weighted: Tensor = (call() * weights).sum()
        return weighted

    return {name: partial(total, call) for name, call in calls.items()}, inputs


BENCHMARK = benchmark(SHAPES, contenders, ours=(OURS,))

if __name__ == "__main__":
    main(__file__, __doc__, "The scan of Mamba 2, forward and backward", BENCHMARK)
