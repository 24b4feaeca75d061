"""Seeded values for tensors of millions of elements, made where the tensor is.

A CPU draws a hundred million normal numbers in seconds, for one tensor of one case. So large tensors take their values
from a table of a million drawn numbers: a hash of an element's place says which. It is made of integers, so every
device chooses the same ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

MANY = 1 << 22  # elements: the samples that a CPU runs have fewer, and keep the values that they had
_TABLE = 1 << 20
_CHUNK = 1 << 20  # elements at a time: their places and hashes are int64
_MASK = 0xFFFF_FFFF
_FACTOR = 0x045D_9F3B  # odd and of 27 bits: its product with 32 bits stays within int64


def table(generator: torch.Generator) -> Tensor:
    """The numbers that :func:`spread` chooses from, normally distributed: float64 ``[2**20]``, on the CPU.

    Args:
        generator: a CPU's; it draws them.

    Example:
        >>> numbers = table(torch.Generator().manual_seed(0))
        >>> numbers.shape, bool((numbers.mean().abs() < 0.01) & ((numbers.std() - 1).abs() < 0.01))
        (torch.Size([1048576]), True)
    """
    return torch.randn(_TABLE, generator=generator, dtype=torch.float64)


def spread(numbers: Tensor, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """A tensor of ``shape``, each element one of ``numbers``, in their dtype and on their device.

    Args:
        numbers: ``[2**20]``.
        shape: the tensor's.
        seed: another one chooses others.

    Example:
        >>> numbers = table(torch.Generator().manual_seed(0))
        >>> rows = spread(numbers, (3, 1024))
        >>> rows.shape, torch.equal(rows, spread(numbers, (3, 1024))), torch.equal(rows[0], rows[1])
        (torch.Size([3, 1024]), True, False)
    """
    made = torch.empty(shape, dtype=numbers.dtype, device=numbers.device)
    flat = made.view(-1)
    for start in range(0, flat.numel(), _CHUNK):
        places = torch.arange(start, min(start + _CHUNK, flat.numel()), device=numbers.device)
        flat[start : start + _CHUNK] = numbers[_hashed(places + seed)]
    return made


def _hashed(places: Tensor) -> Tensor:
    """For each place an index of the table."""
    mixed = places & _MASK
    for _ in range(2):
        mixed = ((mixed ^ (mixed >> 16)) * _FACTOR) & _MASK
    return (mixed ^ (mixed >> 16)) & (_TABLE - 1)
