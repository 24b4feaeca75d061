"""Arithmetic on CPUs whose bits don't depend on where in a batch a row is, nor on how many rows there are.

torch's own products take another path for one row than for many, and its sigmoid, and what is made of it, another at
the end of each thread's elements than before (2.13, in float32). Here each product is of as many rows as every other,
and activations are made of exponentials and divisions, which torch computes alike everywhere.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from veomni_ops.contract import compute_dtype

_ROWS = 32  # of each product: of 8 to 128, the least time from decoding to training in sum
_ALIGNMENT = 64  # bytes; rows that begin elsewhere in a vector have other bits


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``rows[N, A] @ weight[B, A].T + bias[B]``, ``[N, B]``, as products of :data:`_ROWS` rows each."""
    missing = -rows.shape[1] % (_ALIGNMENT // rows.element_size())
    rows, weight = (F.pad(each, (0, missing)) if missing else _aligned(each) for each in (rows, weight))
    result = rows.new_empty(rows.shape[0], weight.shape[0])
    for start in range(0, rows.shape[0], _ROWS):
        tile = rows[start : start + _ROWS]
        count = tile.shape[0]
        tile = tile if count == _ROWS else F.pad(tile, (0, 0, 0, _ROWS - count))
        result[start : start + count] = F.linear(tile, weight, bias)[:count]
    return result


def sum_of_halves(x: Tensor, dim: int) -> Tensor:
    """The sum over ``dim``, which stays with size 1: of its halves, added up element by element, on any device."""
    missing = (1 << max(0, x.shape[dim] - 1).bit_length()) - x.shape[dim]
    if missing:
        shape = list(x.shape)
        shape[dim] = missing
        x = torch.cat((x, x.new_zeros(shape)), dim)
    while x.shape[dim] > 1:
        one, other = x.chunk(2, dim)
        x = one + other
    return x


def sigmoid(x: Tensor) -> Tensor:
    """``1 / (1 + exp(-x))`` in x's dtype; elsewhere than on CPUs, torch's own."""
    if x.device.type != "cpu":
        return torch.sigmoid(x)
    return (1.0 + torch.exp(-x.to(compute_dtype(x)))).reciprocal().to(x.dtype)


def silu(x: Tensor) -> Tensor:
    """``x / (1 + exp(-x))``, as :func:`sigmoid`."""
    if x.device.type != "cpu":
        return F.silu(x)
    wide = x.to(compute_dtype(x))
    return (wide / (1.0 + torch.exp(-wide))).to(x.dtype)


def gelu(x: Tensor, tanh: bool) -> Tensor:
    """``x * (1 + erf(x / sqrt(2))) / 2``, or its approximation by the hyperbolic tangent; as :func:`sigmoid`."""
    if x.device.type != "cpu":
        return F.gelu(x, approximate="tanh" if tanh else "none")
    wide = x.to(compute_dtype(x)).contiguous()
    if tanh:
        inner = torch.tanh(math.sqrt(2 / math.pi) * (wide + 0.044715 * wide * wide * wide))
    else:
        inner = torch.erf(wide * math.sqrt(0.5))
    return (0.5 * wide * (1.0 + inner)).to(x.dtype)


def _aligned(matrix: Tensor) -> Tensor:
    fits = matrix.is_contiguous() and matrix.data_ptr() % _ALIGNMENT == 0
    return matrix if fits else matrix.clone(memory_format=torch.contiguous_format)
