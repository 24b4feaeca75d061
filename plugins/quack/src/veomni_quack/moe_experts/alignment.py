"""What the products ask of their operands: rows of whole 16 bytes, which begin at a multiple of 16 bytes."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from veomni_core.ops.memory_layout import aligned

_UNIT = 8  # 16-bit values


def padded(hidden: Tensor, gate_up_proj: Tensor, down_proj: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The operands with ``H`` and ``I`` rounded up to multiples of 8 by zeros.

    Zeros change no result: an added pre-activation is 0, and so is ``silu(0) * 0``. Autograd cuts the gradients.
    """
    more_hidden, more_inside = (-size % _UNIT for size in down_proj.shape[1:])
    if not (more_hidden or more_inside):
        return hidden, gate_up_proj, down_proj
    halves = gate_up_proj.unflatten(1, (2, -1))
    return (
        F.pad(hidden, (0, more_hidden)),
        F.pad(halves, (0, more_hidden, 0, more_inside)).flatten(1, 2),
        F.pad(down_proj, (0, more_inside, 0, more_hidden)),
    )


def readable(operand: Tensor) -> Tensor:
    """``operand``, or a copy of it where it isn't contiguous or doesn't begin at a multiple of 16 bytes."""
    return aligned(operand.contiguous())
