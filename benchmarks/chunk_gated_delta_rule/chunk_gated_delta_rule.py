"""The gated delta rule, forward and backward: chunked_delta beside transformers' own code and fla's kernel.

    python benchmarks/chunk_gated_delta_rule/chunk_gated_delta_rule.py

Writes ``benchmarks/results/chunk_gated_delta_rule.json``. Contenders take turns in several processes. A time
is the median over processes of the median turn. Memory is the peak of what PyTorch's allocator holds above the inputs,
gradients of the inputs included. fla's kernel is measured where flash-linear-attention is installed, on a GPU.
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
from transformers.models.qwen3_next import modeling_qwen3_next

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's root, for `benchmarks`

from benchmarks.shared.accuracy import hold
from benchmarks.shared.beside_transformers import EAGER, benchmark, main
from benchmarks.shared.in_processes import Calls, asked, leaf
from veomni_ops.chunk_gated_delta_rule import standard as reference
from veomni_torch import chunk_gated_delta_rule

OURS, FLA = "chunked_delta", "fla"


@dataclass(frozen=True)
class Shape:
    """A batch, and the heads of one layer."""

    batch: int
    tokens: int
    key_heads: int
    value_heads: int
    width: int
    dtype: torch.dtype

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        heads = f"{self.key_heads} key heads, {self.value_heads} value heads of {self.width}"
        return f"{self.batch} x {self.tokens} tokens, {heads}, {dtype}"


# On a CPU a quarter of Qwen3-Next's heads, and all of them on a GPU.
SHAPES = {
    "cpu": {
        "float32": Shape(1, 2048, 4, 8, 128, torch.float32),
        "bfloat16": Shape(1, 2048, 4, 8, 128, torch.bfloat16),
    },
    "cuda": {"qwen3_next": Shape(2, 4096, 16, 32, 128, torch.bfloat16)},
}
ALLOWED = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # the errors of results, as norms


def contenders(shape: Shape, device: str, only: Collection[str] | None) -> tuple[Calls, list[Tensor]]:
    """The calls, each giving the sum of the output weighted by a fixed random tensor."""
    options = {"device": device, "dtype": shape.dtype}
    tokens = (shape.batch, shape.tokens)
    query, key = (leaf(*tokens, shape.key_heads, shape.width, **options) for _ in range(2))
    value = leaf(*tokens, shape.value_heads, shape.width, **options)
    g = (-torch.rand(*tokens, shape.value_heads, device=device) * 0.2).requires_grad_()
    beta = torch.rand(*tokens, shape.value_heads, **options).requires_grad_()
    inputs = [query, key, value, g, beta]
    functions: dict[str, Any] = {
        EAGER: inspect.unwrap(modeling_qwen3_next.torch_chunk_gated_delta_rule),
        OURS: chunk_gated_delta_rule.standard,
    }
    if device == "cuda" and importlib.util.find_spec("fla"):
        functions[FLA] = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
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


BENCHMARK = benchmark(SHAPES, contenders, ours=(OURS,))

if __name__ == "__main__":
    main(__file__, __doc__, "The gated delta rule, forward and backward", BENCHMARK)
