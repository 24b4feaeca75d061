"""Meets the GEMMs' requirements: row lengths and row addresses that are multiples of 16 bytes."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from veomni_core.kernels import aligned

_UNIT = 8  # 16 bytes of 16-bit values


def padded(hidden: Tensor, gate_up_proj: Tensor, down_proj: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The operands with ``H`` and ``I`` padded with zeros to multiples of 8.

    The zeros change no result: a padded pre-activation is 0, and so is its activation ``silu(0) * 0``. The padding is
    differentiable, so autograd slices the gradients back to the original sizes.

    Args:
        hidden: ``[T, H]``.
        gate_up_proj: ``[E, 2I, H]``.
        down_proj: ``[E, H, I]``.
    """
    more_hidden, more_inside = (-size % _UNIT for size in down_proj.shape[1:])
    if not (more_hidden or more_inside):
        return hidden, gate_up_proj, down_proj
    halves = gate_up_proj.unflatten(1, (2, -1))  # [E, 2, I, H]: gate and up are padded separately
    return (
        F.pad(hidden, (0, more_hidden)),
        F.pad(halves, (0, more_hidden, 0, more_inside)).flatten(1, 2),
        F.pad(down_proj, (0, more_inside, 0, more_hidden)),
    )


def readable(operand: Tensor) -> Tensor:
    """``operand``, or a copy if it isn't contiguous or its address is no multiple of 16 bytes."""
    return aligned(operand.contiguous())
