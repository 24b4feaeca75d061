"""What losses share that compute a head's logits and gradients for one chunk of tokens at a time."""

from __future__ import annotations

import torch
from torch import Tensor

# 1024 tokens of 151936 16-bit logits are 297 MiB, half of what the gradient of that vocabulary's weight (H=2048) takes.
# Twice as many save 4 % of the loss's time on an H200. Liger's own chunks have logits no larger than the hidden states:
# 128 of 8192 tokens, products with so few rows that tensor cores idle (benchmarks/results/liger_adapters_h200.json).
LOGITS_BYTES = 300 << 20
_TILE = 128  # rows of a product's tile


def chunks(tokens: int, vocabulary: int, element_size: int) -> list[slice]:
    """Slices of the tokens, of whole tiles: as few as :data:`LOGITS_BYTES` of logits allow, and about equally long.

    Example:
        >>> chunks(1500, 151936, element_size=2)
        [slice(0, 768, None), slice(768, 1500, None)]
    """
    most = max(LOGITS_BYTES // (vocabulary * element_size * _TILE), 1) * _TILE
    count = max(-(-tokens // most), 1)
    rows = -(-tokens // (count * _TILE)) * _TILE
    return [slice(start, min(start + rows, tokens)) for start in range(0, tokens, rows or 1)]


def kept_for_backward(gradient: Tensor, dtype: torch.dtype) -> Tensor:
    """``gradient``, a float32 sum over all tokens, in ``dtype``; but in float32 for float16.

    The sum over 131072 tokens may exceed 65504, where float16 overflows, even if the mean is small.

    Example:
        >>> kept_for_backward(torch.tensor([1e5]), torch.float16)
        tensor([100000.])
    """
    return gradient if dtype == torch.float16 else gradient.to(dtype)


def scaled(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """``gradient * factor``, computed in float32 and rounded once to ``dtype``.

    The factor is reshaped to ``[1]``: on a GPU, a zero-dimensional factor would first be rounded to gradient's dtype.

    Example:
        >>> scaled(torch.ones(2), torch.tensor(0.5), torch.bfloat16)
        tensor([0.5000, 0.5000], dtype=torch.bfloat16)
    """
    return torch.mul(gradient, factor.reshape(1), out=torch.empty_like(gradient, dtype=dtype))
