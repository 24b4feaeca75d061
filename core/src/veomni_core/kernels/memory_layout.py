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

    Returns:
        A tensor of operand's shape, dtype and values.

    Example:
        >>> gate, up = torch.zeros(4, 2 * 97).bfloat16().chunk(2, dim=-1)  # halves of a packed projection
        >>> gate.stride(), aligned(gate).stride()  # rows of 104 elements, 208 bytes
        ((194, 1), (104, 1))
        >>> weight = torch.zeros(64, 128)
        >>> aligned(weight) is weight
        True
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

    Args:
        operand: a tensor of one dimension or more, of any dtype.
        alignment: in bytes.
        expanded: whether strides of zero are fine.

    Example:
        >>> x = torch.zeros(4, 128)
        >>> is_aligned(x), is_aligned(x[:, 1:]), is_aligned(x.T)
        (True, False, False)
        >>> row = torch.zeros(128).expand(4, 128)
        >>> is_aligned(row), is_aligned(row, expanded=True)
        (False, True)
    """
    return _strides_fit(operand, alignment, expanded) and begins_aligned(operand, alignment)


def begins_aligned(operand: Tensor, alignment: int = ALIGNMENT) -> bool:
    """Whether ``operand``'s address is a multiple of ``alignment`` bytes.

    True also if it can't be known: while tracing, for fake tensors, and for tensor subclasses.

    Args:
        operand: a tensor of any shape and dtype.
        alignment: in bytes.

    Example:
        >>> x = torch.zeros(4, 128)
        >>> begins_aligned(x), begins_aligned(x[:, 1:]), begins_aligned(x[:, 4:])  # 4 elements are 16 bytes
        (True, False, True)
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

    Args:
        operand: a tensor of one dimension or more, of any dtype, fake or real.
        alignment: in bytes.
        expanded: as for :func:`aligned`.

    Example:
        >>> empty_like_aligned(torch.zeros(4, 8).T).stride()  # contiguous, as the copy would be
        (4, 1)
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
