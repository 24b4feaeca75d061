"""Alignment for kernels with 16-byte memory accesses: checks operands, and copies those that are not aligned.

Such kernels (CuTe DSL's, FlashAttention's, cuBLAS's grouped products) raise or crash if an operand's address or a
stride is not a multiple of 16 bytes, or if the last dimension is not contiguous. Training does produce such operands: a
slice of a packed projection, a shard of a flat buffer, a transposed or expanded gradient. Most operands are aligned,
and then :func:`aligned` only reads the strides and the address.

The address is known only when the kernel runs, not while ``torch.compile`` traces. So call :func:`aligned` in the
implementation of the custom operator, if there is one. While anything else is traced, only strides are checked.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter

ALIGNMENT = 16
_PLAIN = (Tensor, Parameter)


def aligned(operand: Tensor, alignment: int = ALIGNMENT, expanded: bool = False) -> Tensor:
    """``operand`` itself if it :func:`is_aligned`, else an aligned copy. Gradients pass through the copy.

    The copy is contiguous, with two exceptions. If the size of a row is no multiple of ``alignment``, rows are padded
    to one. If only the address was misaligned, the copy keeps the operand's order of dimensions in memory.

    Args:
        operand: the tensor.
        alignment: in bytes.
        expanded: whether the kernel accepts strides of zero, which repeat a row.
    """
    strides_fit = _strides_fit(operand, alignment, expanded)
    if strides_fit and begins_aligned(operand, alignment):
        return operand
    width, unit = operand.shape[-1], max(alignment // operand.element_size(), 1)
    if width % unit:
        rows = operand.new_empty(*operand.shape[:-1], -(-width // unit) * unit)
        return rows[..., :width].copy_(operand)
    return operand.clone(memory_format=torch.preserve_format if strides_fit else torch.contiguous_format)


def is_aligned(operand: Tensor, alignment: int = ALIGNMENT, expanded: bool = False) -> bool:
    """Whether the last dimension is contiguous, and address and other strides are multiples of ``alignment`` bytes.

    A stride of zero, which repeats a row, counts as aligned only with ``expanded``.
    """
    return _strides_fit(operand, alignment, expanded) and begins_aligned(operand, alignment)


def begins_aligned(operand: Tensor, alignment: int = ALIGNMENT) -> bool:
    """Whether ``operand``'s address is a multiple of ``alignment`` bytes.

    True also if it can't be known: while tracing, for fake tensors, and for tensor subclasses.
    """
    if torch.compiler.is_compiling() or type(operand) not in _PLAIN:
        return True
    try:
        return operand.data_ptr() % alignment == 0
    except RuntimeError:  # a tensor that torch.func wraps has no address
        return True


def empty_like_aligned(operand: Tensor, alignment: int = ALIGNMENT, expanded: bool = False) -> Tensor:
    """Uninitialised memory with the strides of ``torch.empty_like(aligned(operand))``, without looking at the address.

    For fake implementations of kernels that give a gradient the layout of the operand.
    """
    if _strides_fit(operand, alignment, expanded):
        return torch.empty_like(operand)
    return torch.empty_like(operand, memory_format=torch.contiguous_format)


def _strides_fit(operand: Tensor, alignment: int, expanded: bool) -> bool:
    strides, size = operand.stride(), operand.element_size()
    if strides[-1] != 1:
        return False
    for stride in strides[:-1]:  # noqa: SIM110  this runs in each call, and `all` takes twice the time
        if stride * size % alignment != 0 or (stride == 0 and not expanded):
            return False
    return True
