"""TMA descriptors of operands. Triton checks one for longer than a launch takes, so a layout is checked once."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from triton.tools.ragged_tma import create_ragged_descriptor
from triton.tools.tensor_descriptor import TensorDescriptor


def described(tensor: Tensor, block: tuple[int, ...]) -> TensorDescriptor:
    """A TMA descriptor of ``tensor``, loaded ``block`` at a time; what lies outside the tensor reads as zeros."""
    return _of(tensor, block, False)


def described_rows(tensor: Tensor, block: tuple[int, ...]) -> TensorDescriptor:
    """A ragged TMA descriptor of ``tensor[N, C]``, whose blocks are bounded by the group that a load or store names."""
    return _of(tensor, block, True)


def _of(tensor: Tensor, block: tuple[int, ...], ragged: bool) -> TensorDescriptor:
    if tensor.data_ptr() % 16:
        return _checked(tensor, block, ragged)  # which raises
    descriptor = object.__new__(TensorDescriptor)
    descriptor.__dict__.update(_layout(tensor.shape, tensor.stride(), tensor.dtype, block, ragged), base=tensor)
    return descriptor


@lru_cache(maxsize=1024)  # the number of rows varies by batch
def _layout(
    shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype, block: tuple[int, ...], ragged: bool
) -> dict[str, object]:
    """The fields of a descriptor, as Triton checks and makes them."""
    return vars(_checked(torch.empty_strided(shape, strides, dtype=dtype, device="meta"), block, ragged))


def _checked(tensor: Tensor, block: tuple[int, ...], ragged: bool) -> TensorDescriptor:
    make = create_ragged_descriptor if ragged else TensorDescriptor.from_tensor
    return make(tensor, list(block))
