"""rotary_pos_emb_vision: one launch for queries and keys, in which both dimensions of a pair have angles of their own.

All arithmetic is float32, and each result is rounded once, to the dtype of q or k: the reference's bits. The gradient
is the transpose of the rotation, so backward needs only ``cos`` and ``sin``, which get none themselves.

Every variant takes q ``[..., S, Hq, D]`` and k ``[..., S, Hk, D]`` of any strides and floating dtypes, and ``cos`` and
``sin`` of ``[..., S, R]``, with q's leading dimensions, with none, or with ones. Results have the shapes and dtypes of
q and k, and are contiguous. Raised are ``ValueError``, where these shapes don't fit, and ``RuntimeError`` for second
derivatives.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function

from veomni_core.kernels import first_derivatives_only
from veomni_triton.rotary_pos_emb_vision.operators import rotary_pos_emb_vision


def full(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate every dimension in pairs ``(i, i + D/2)``, ``R = D``."""
    return _whole(q, k, cos, sin, False)


def pairwise(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate neighbours ``(2i, 2i + 1)``, ``R = D``."""
    return _whole(q, k, cos, sin, True)


def partial(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate the first ``R`` dimensions in pairs ``(i, i + R/2)``; the others are copied unchanged."""
    return _RotaryPosEmbVision.apply(q, k, cos, sin, False)


def _whole(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, neighbours: bool) -> tuple[Tensor, Tensor]:
    if cos.shape[-1] != q.shape[-1]:
        raise ValueError(f"cos is for {cos.shape[-1]} of a head's {q.shape[-1]} dimensions, expected all of them")
    return _RotaryPosEmbVision.apply(q, k, cos, sin, neighbours)


class _RotaryPosEmbVision(Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, neighbours: bool) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.neighbours = neighbours
        return rotary_pos_emb_vision(q, k, cos, sin, neighbours, False)

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return *rotary_pos_emb_vision(dq, dk, cos, sin, ctx.neighbours, True), None, None, None
