"""Copies of strided tensors, in words of 8 bytes where their layouts have whole ones.

torch copies strided tensors number by number. With words, and with convolutions that keep their layout, Ulysses takes
457 ms on two H200 where it took 491 (``benchmarks/attention/shared_sequences.py``, Qwen3-Next's widths).
"""

from __future__ import annotations

import torch
from torch import Tensor


def copy(target: Tensor, source: Tensor) -> Tensor:
    """``target.copy_(source)``."""
    numbers = 8 // target.element_size()
    if numbers > 1 and target.dtype == source.dtype and all(_has_words(each, numbers) for each in (target, source)):
        target.view(torch.int64).copy_(source.view(torch.int64))
    else:
        target.copy_(source)
    return target


def contiguous(x: Tensor) -> Tensor:
    """``x.contiguous()``."""
    return x if x.is_contiguous() else copy(torch.empty_like(x, memory_format=torch.contiguous_format), x)


def merged(x: Tensor, dim: int) -> Tensor:
    """``x.flatten(dim, dim + 1)``; a view where it can be one."""
    is_view = x.stride(dim) == x.shape[dim + 1] * x.stride(dim + 1)
    return (x if is_view else contiguous(x)).flatten(dim, dim + 1)


def _has_words(x: Tensor, numbers: int) -> bool:
    if torch.compiler.is_compiling():  # a graph's copies are generated, and it does not know offsets
        return False
    *strides, last = x.stride()
    sizes = x.shape[-1], x.storage_offset(), *strides
    return last == 1 and not any(size % numbers for size in sizes)
