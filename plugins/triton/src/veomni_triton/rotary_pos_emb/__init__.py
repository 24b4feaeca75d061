"""rotary_pos_emb: one launch for queries and keys, which loads a position's angles once for all of its heads.

The gradient of a rotation is its transpose: the same launch with the opposite angle, which reads pairs where forward
wrote them. Backward therefore needs only ``cos`` and ``sin``. Every product and sum is rounded, so that results equal
the reference's bit for bit.

Every variant takes q ``[B, Hq, S, D]`` and k ``[B, Hk, S, D]`` of any strides, or ``[B, S, H, D]`` with
``unsqueeze_dim=2``, and ``cos`` and ``sin`` of ``[B or 1, S, R]`` in the layout that the variant's contract states. No
gradient reaches these two. Results have the dtypes of q and k, and their strides where those are dense. Raised are
``ValueError``, where ``cos`` is not as wide as the variant needs or ``unsqueeze_dim`` is neither 1 nor 2, and
``RuntimeError`` for second derivatives.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function

from veomni_core.kernels import first_derivatives_only
from veomni_triton.rotary_pos_emb.form import Form
from veomni_triton.rotary_pos_emb.operators import rotary_pos_emb

_HALVES = Form()
_NEIGHBOURS = Form(reads_neighbours=True, writes_neighbours=True)


def full(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """Rotate all dimensions in pairs ``(i, i + D/2)``; both halves of ``cos`` are the same, and the first is read."""
    return _whole(q, k, _first_half(cos), _first_half(sin), unsqueeze_dim, _HALVES)


def partial(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """:func:`full` in the first ``R`` dimensions; the others are copied unchanged."""
    return _rotated(q, k, _first_half(cos), _first_half(sin), unsqueeze_dim, _HALVES)


def sign_flipped(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """:func:`full` by the negative angle."""
    return _whole(q, k, _first_half(cos), _first_half(sin), unsqueeze_dim, Form(backwards=True))


def half_width(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """:func:`full` with ``cos [B or 1, S, D/2]``, one entry for each pair."""
    return _whole(q, k, cos, sin, unsqueeze_dim, _HALVES)


def pairwise(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """Rotate neighbours ``(2i, 2i + 1)``; ``cos`` has each pair's entry twice, side by side."""
    return _whole(q, k, _every_other(cos), _every_other(sin), unsqueeze_dim, _NEIGHBOURS)


def pairwise_partial(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """:func:`pairwise` in the first ``R`` dimensions; the others are copied unchanged."""
    return _rotated(q, k, _every_other(cos), _every_other(sin), unsqueeze_dim, _NEIGHBOURS)


def interleaved(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """Rotate neighbours ``(2i, 2i + 1)`` by the first half of ``cos``, one entry for each pair."""
    return _whole(q, k, _first_half(cos), _first_half(sin), unsqueeze_dim, _NEIGHBOURS)


def interleaved_partial(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """:func:`interleaved` in the first ``R`` dimensions; the others are copied unchanged."""
    return _rotated(q, k, _first_half(cos), _first_half(sin), unsqueeze_dim, _NEIGHBOURS)


def deinterleaved(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """:func:`interleaved`, with the pair ``i`` written to the dimensions ``(i, i + D/2)``."""
    return _whole(q, k, _first_half(cos), _first_half(sin), unsqueeze_dim, Form(reads_neighbours=True))


def single(x: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Tensor:
    """:func:`full` of one tensor."""
    return full(x, _no_heads(x, unsqueeze_dim), cos, sin, unsqueeze_dim)[0]


def single_tail(x: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Tensor:
    """Rotate neighbours in the last ``2R`` dimensions of one tensor; ``cos`` has one entry for each pair."""
    form = _NEIGHBOURS._replace(last=True)
    return _rotated(x, _no_heads(x, unsqueeze_dim), cos, sin, unsqueeze_dim, form)[0]


def _whole(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int, form: Form) -> tuple[Tensor, Tensor]:
    if 2 * cos.shape[-1] != q.shape[-1]:
        raise ValueError(f"cos is for {2 * cos.shape[-1]} of a head's {q.shape[-1]} dimensions, expected all of them")
    return _rotated(q, k, cos, sin, unsqueeze_dim, form)


def _rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int, form: Form) -> tuple[Tensor, Tensor]:
    """Rotate by ``cos`` and ``sin`` of ``[B or 1, S, pairs]``."""
    if unsqueeze_dim not in (1, 2):
        raise ValueError(f"unsqueeze_dim is {unsqueeze_dim}, expected 1 for [B, H, S, D] or 2 for [B, S, H, D]")
    if 2 * cos.shape[-1] > q.shape[-1]:
        raise ValueError(f"cos is for {2 * cos.shape[-1]} dimensions, but a head has {q.shape[-1]}")
    return _RotaryPosEmb.apply(q, k, cos, sin, unsqueeze_dim, form)


def _first_half(angles: Tensor) -> Tensor:
    return angles.narrow(-1, 0, angles.shape[-1] // 2)


def _every_other(angles: Tensor) -> Tensor:
    return angles[..., ::2]


def _no_heads(x: Tensor, unsqueeze_dim: int) -> Tensor:
    """Keys for a call that has none."""
    return x.detach().narrow(unsqueeze_dim, 0, 0)


class _RotaryPosEmb(Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int, form: Form
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.unsqueeze_dim, ctx.form = unsqueeze_dim, form
        return rotary_pos_emb(q, k, cos, sin, unsqueeze_dim, *form)

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        gradients = rotary_pos_emb(dq, dk, cos, sin, ctx.unsqueeze_dim, *ctx.form.transposed())
        return *gradients, None, None, None, None
