"""What CuTe's calls check of their operands before a kernel runs, as QuACK compiles its kernels."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def check(name: str, operand: Tensor, elements: int = 0, leading: int = -1) -> None:
    """Raise where an address or a stride is no multiple of ``elements`` values, which are 16 bytes where none are said.

    One stride is 1: that of the dimension ``leading``.
    """
    if type(operand) is not Tensor or not operand.numel():  # fake tensors have no address; nothing runs on empty ones
        return
    elements = elements or 16 // operand.element_size()
    if operand.data_ptr() % (elements * operand.element_size()):
        raise ValueError(f"Misaligned Tensor data on argument {name}: expected {elements} values")
    for dimension, stride in enumerate(operand.stride()):
        is_leading = dimension == leading % operand.dim()
        if (stride != 1) if is_leading else (stride == 0 or stride % elements):
            raise ValueError(f"Invalid {name}.strides[{dimension}]: {stride}")


def common_width(width: int, *operands: Tensor | None) -> int:
    """How many values QuACK's reductions move at once: ``math.gcd(N, 128 // width of each dtype)``."""
    return math.gcd(width, *(16 // operand.element_size() for operand in operands if operand is not None))


def check_matrix(name: str, operand: Tensor) -> None:
    """An operand of a product: rows or columns are contiguous, and everything else is whole 16 bytes."""
    check(name, operand, leading=-1 if operand.stride(-1) == 1 else -2)


def lies_badly() -> dict[str, Tensor]:
    """Tensors that no call of QuACK takes."""
    return {
        "address": torch.zeros(17)[1:].view(4, 4),
        "row stride": torch.zeros(4, 7)[:, :4],
        "one row": torch.zeros(1, 7)[:, :4],
        "last stride": torch.zeros(4, 8)[:, ::2],
        "repeated": torch.zeros(1, 4).expand(4, 4),
    }
