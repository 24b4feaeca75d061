"""TMA descriptors of operands, which the GPU copies by itself.

Triton checks one for longer than a launch takes, so a layout is checked once.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from veomni_core.kernels import is_aligned
from veomni_ops.triton_gpus import gpu_of

if TYPE_CHECKING:  # this package doesn't require Triton
    from triton.tools.tensor_descriptor import TensorDescriptor

# Of shared memory: what SM90 and SM100 have, where tiles for descriptors were tuned. They take up to 213 KB. SM120 has
# a copy engine, and 99 KB.
SHARED_BYTES = 227 << 10


def can_be_described(tensor: Tensor) -> bool:
    """Whether products may read ``tensor`` through a TMA descriptor: 16-bit values, aligned lines, SM90 or SM100.

    Example:
        >>> can_be_described(torch.zeros(64, 64))  # of float32
        False
    """
    # float32 takes the pointer path: its exact products don't run on tensor cores, and its tiles are small.
    gpu = gpu_of(tensor.device)
    fits = tensor.element_size() == 2 and gpu.has_copy_engine and gpu.shared_bytes >= SHARED_BYTES
    return fits and is_aligned(tensor, expanded=True)


def described(tensor: Tensor, block: tuple[int, ...]) -> TensorDescriptor:
    """A TMA descriptor of ``tensor``, loaded ``block`` at a time; what lies outside the tensor reads as zeros.

    Example:
        >>> described(torch.zeros(128, 64, dtype=torch.bfloat16), (64, 32)).block_shape
        [64, 32]
    """
    return _of(tensor, block, False)


def described_rows(tensor: Tensor, block: tuple[int, ...]) -> TensorDescriptor:
    """A ragged TMA descriptor of ``tensor[N, C]``, whose blocks are bounded by the group that a load or store names.

    Example:
        >>> described_rows(torch.zeros(128, 64, dtype=torch.bfloat16), (64, 32)).block_shape
        [1, 1, 64, 32]
    """
    return _of(tensor, block, True)


def _of(tensor: Tensor, block: tuple[int, ...], ragged: bool) -> TensorDescriptor:
    if tensor.data_ptr() % 16:
        return _checked(tensor, block, ragged)  # which raises
    kind, fields = _layout(tensor.shape, tensor.stride(), tensor.dtype, block, ragged)
    descriptor = object.__new__(kind)
    descriptor.__dict__.update(fields, base=tensor)
    return descriptor


@lru_cache(maxsize=1024)  # the number of rows varies by batch
def _layout(
    shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype, block: tuple[int, ...], ragged: bool
) -> tuple[type[TensorDescriptor], dict[str, object]]:
    """A descriptor's class, which takes a microsecond to import, and its fields, as Triton checks and makes them."""
    descriptor = _checked(torch.empty_strided(shape, strides, dtype=dtype, device="meta"), block, ragged)
    return type(descriptor), vars(descriptor)


def _checked(tensor: Tensor, block: tuple[int, ...], ragged: bool) -> TensorDescriptor:
    from triton.tools.ragged_tma import create_ragged_descriptor
    from triton.tools.tensor_descriptor import TensorDescriptor

    make = create_ragged_descriptor if ragged else TensorDescriptor.from_tensor
    return make(tensor, list(block))
