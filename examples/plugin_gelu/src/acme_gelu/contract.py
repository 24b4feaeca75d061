"""gelu: ``(x[..., I]) -> [..., I]`` of x's dtype."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from veomni_ops.contract import Contract, Draw, Sample, Tolerance, compute_dtype, leaf


def tanh(x: Tensor) -> Tensor:
    """``0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))`` (Hendrycks and Gimpel 2016), rounded once at the end."""
    wide = x.to(compute_dtype(x))
    inner = math.sqrt(2 / math.pi) * (wide + 0.044715 * wide.pow(3))
    return (0.5 * wide * (1 + inner.tanh())).to(x.dtype)


def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Odd sizes, both tails, a stride, and nothing at all."""
    draw = Draw(device, dtype)
    yield Sample("odd sizes", (leaf(draw.normal(3, 5, 37)),))
    yield Sample("both tails", (leaf(draw.normal(4, 64, scale=10.0)),))
    yield Sample("every other column", (leaf(draw.normal(6, 64)[:, ::2]),))
    yield Sample("no rows", (leaf(draw.normal(0, 16)),))


VALUES = {
    "float32": Tolerance(element=4e-6, norm=1e-6),
    "bfloat16": Tolerance(element=1.2e-2, norm=4e-3),
    "float16": Tolerance(element=1.5e-3, norm=5e-4),
}

CONTRACTS = {"tanh": Contract("gelu", "tanh", tanh, samples, VALUES, VALUES)}
