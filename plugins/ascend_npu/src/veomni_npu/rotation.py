"""Rotations by ``npu_rotary_mul``. Backward is a rotation too, so only ``cos`` and ``sin`` are saved.

Limits without ``jit_compile``: heads of an even width below 896; batch and heads below 1000 each; ``cos`` and ``sin``
within [-1, 1] (YaRN's exceed that, because its attention factor scales them).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from veomni_core.kernels import first_derivatives_only
from veomni_npu.operators import npu


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``x * cos + rotate_half(x) * sin``, computed in the wider dtype of ``x`` and ``cos``, rounded to x's dtype.

    ``x[B, N, S, D]`` with ``cos[B or 1, 1, S, D]``, or ``x[B, S, N, D]`` with ``cos[B or 1, S, 1, D]``; N heads. Only
    ``x`` gets a gradient.
    """
    return _Rotation.apply(x, cos.detach(), sin.detach())


class _Rotation(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin)

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        # The transposed rotation: sin's halves swapped, with the opposite sign.
        return _rotate(dy, cos, -sin.roll(sin.shape[-1] // 2, -1)), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    wide = torch.promote_types(x.dtype, cos.dtype)
    return npu.npu_rotary_mul(x.to(wide), cos.to(wide), sin.to(wide)).to(x.dtype)
