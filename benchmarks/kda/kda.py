"""Kimi delta attention, forward and backward: chunked_kda beside transformers' own code and fla's kernel.

    python benchmarks/kda/kda.py

Writes ``benchmarks/results/kda.json``. Contenders take turns in several processes. A time is the median over
processes of the median turn; on a CPU with one thread. Memory is the peak of what PyTorch's allocator holds above the
inputs, gradients of the inputs included. fla's kernel is measured where flash-linear-attention is installed, on a GPU.
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
from transformers.models.kimi_linear import modeling_kimi_linear

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's root, for `benchmarks`

from benchmarks.shared.accuracy import hold
from benchmarks.shared.beside_transformers import EAGER, benchmark, main
from benchmarks.shared.in_processes import Calls, asked, leaf
from veomni_ops.kda import standard as reference
from veomni_torch import kda

OURS, FLA = "chunked_kda", "fla"


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


def contenders(shape: Shape, device: str, only: Collection[str] | None) -> tuple[Calls, list[Tensor]]:
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
    calls = {
        name: partial(each, *inputs, use_qk_l2norm_in_kernel=True) for name, each in asked(functions, only).items()
    }
    with torch.no_grad():
        exact = reference(*(x.double() for x in inputs), use_qk_l2norm_in_kernel=True)[0]
        for name, call in calls.items():
            hold(name, call()[0], exact, ALLOWED[shape.dtype])
    weights = torch.randn(value.shape, **options)

    def total(call: Any) -> Tensor:
        weighted: Tensor = (call()[0] * weights).sum()
        return weighted

    return {name: partial(total, call) for name, call in calls.items()}, inputs


BENCHMARK = benchmark(
    SHAPES,
    contenders,
    ours=(OURS,),
    repeats=2,
    threads=1,  # with more of them, what else the machine does would count for more
)

if __name__ == "__main__":
    main(__file__, __doc__, "Kimi delta attention, forward and backward", BENCHMARK, processes=3)
