"""What both causal losses share: chunks of tokens, the arithmetic after the output projection, and float32 sums.

Shapes: T tokens, V words of the vocabulary or of a shard of it, rows = tokens of one chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Bytes of float32 logits held at a time. On a CPU (benchmarks/cross_entropy_loss/chunk_sizes.py: 2 cores, T=2048,
# H=256, V=32000) 16, 32, 64 and 128 MiB took 0.71, 0.65, 0.63 and 0.70 of the time of transformers' loss, and 11, 17,
# 30 and 54 % of its memory. A GPU needs more rows to fill its tensor cores: 1 GiB holds 1766 rows of 151936 logits.
CPU_CHUNK_BYTES, ACCELERATOR_CHUNK_BYTES = 32 << 20, 1 << 30
_FEWEST_ROWS = 128


def chunks(tokens: int, vocabulary: int, device: torch.device) -> list[slice]:
    """Slices of the tokens, so small that the float32 logits of one fit the bytes above."""
    budget = CPU_CHUNK_BYTES if device.type == "cpu" else ACCELERATOR_CHUNK_BYTES
    rows = max(_FEWEST_ROWS, budget // (4 * vocabulary))
    return [slice(start, start + rows) for start in range(0, tokens, rows)]


def scaled_and_capped(
    logits: Tensor, softcap: float | None, scale: float | None
) -> tuple[Tensor, Tensor | float | None]:
    """The logits after scale and softcap, and their derivative by the unscaled logits; ``None`` stands for 1.

    With a scale or a softcap the result is float32.
    """
    slope: Tensor | float | None = scale
    if scale is not None:
        logits = logits.float() * scale
    if softcap is not None:
        bounded = torch.tanh(logits.float() / softcap)
        slope = (1.0 - bounded.square()) * (1.0 if scale is None else scale)
        logits = softcap * bounded
    return logits, slope


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """``total += a @ b`` with ``total`` in float32."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.is_cuda and torch.compiler.is_compiling():  # torch 2.11 can't trace addmm with another dtype of the result
        total += torch.mm(a, b, out_dtype=total.dtype)
    elif a.is_cuda:  # reads and writes the total once; a separate addition would also write and read the product
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    elif a.dtype == torch.float16:  # a sum over a chunk's tokens may overflow in float16
        total.addmm_(a.float(), b.float())
    else:
        total += a @ b
