"""Where operands must lie in memory for kernels that move 16 bytes at once, and copies of those that lie elsewhere.

Such a kernel (CuTe DSL's, FlashAttention's, cuBLAS's grouped products) raises, or ends the process, where an operand
begins between two multiples of 16 bytes, where a stride isn't such a multiple, or where the last dimension isn't
contiguous. Training gives it such operands: a slice of a packed projection, a shard of a flat buffer, a transposed or
expanded gradient. Mostly everything lies well, and then :func:`aligned` costs a look at the strides and the address.

An address is only known where the kernel runs. ``torch.compile`` doesn't know it while it traces; so call
:func:`aligned` within a custom operator's implementation where there is one. Elsewhere only strides are looked at while
something is traced.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter

ALIGNMENT = 16
_PLAIN = (Tensor, Parameter)


def aligned(operand: Tensor, alignment: int = ALIGNMENT, expanded: bool = False) -> Tensor:
    """``operand`` itself where it :func:`is_aligned`, or else a copy that is; gradients pass through it.

    The copy is contiguous, but for what a width that is no multiple of ``alignment`` leaves unused after each row; and
    where only the address is wrong, its dimensions lie in the order in which they came.
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

    A stride of zero, which repeats a row, does not fit unless ``expanded`` says that the kernel takes it.
    """
    return _strides_fit(operand, alignment, expanded) and begins_aligned(operand, alignment)


def begins_aligned(operand: Tensor, alignment: int = ALIGNMENT) -> bool:
    """Whether ``operand``'s address is a multiple of ``alignment`` bytes, as far as it is known.

    It has none while it is traced or where it is fake, nor may it where it is of a subclass.
    """
    if torch.compiler.is_compiling() or type(operand) not in _PLAIN:
        return True
    try:
        return operand.data_ptr() % alignment == 0
    except RuntimeError:  # torch.func wraps it
        return True


def empty_like_aligned(operand: Tensor, alignment: int = ALIGNMENT, expanded: bool = False) -> Tensor:
    """Unwritten memory in the layout of :func:`aligned`'s result, of which a fake implementation knows all but where.

    For kernels that give a gradient the layout of the operand.
    """
    if _strides_fit(operand, alignment, expanded):
        return torch.empty_like(operand)
    return torch.empty_like(operand, memory_format=torch.contiguous_format)


def _strides_fit(operand: Tensor, alignment: int, expanded: bool) -> bool:
    strides, size = operand.stride(), operand.element_size()
    if strides[-1] != 1:
        return False
    for stride in strides[:-1]:  # noqa: SIM110  each call pays for this, and `all` takes twice the time
        if stride * size % alignment != 0 or (stride == 0 and not expanded):
            return False
    return True
