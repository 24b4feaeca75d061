"""rotary_pos_emb by Liger's in-place rotation, applied to copies of queries and keys.

``rope_forward`` and ``rope_backward`` rotate ``q`` and ``k`` in place, in the layout ``[B, S, H, D]``. The model may
still read its queries and keys, and autograd the incoming gradient, so each is first copied into that layout. (Tensors
in another layout are copied by Liger's own function as well.) Saved for backward: ``cos`` and ``sin``.

Shapes: B batch, S sequence length, H heads (Hq of queries, Hk of keys), D head width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from veomni_core.kernels import first_derivatives_only
from veomni_liger.loading import part
from veomni_ops.torch_operators import operator

_rope_forward, _rope_backward = part("rope", "rope_forward"), part("rope", "rope_backward")


def full(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """Rotate every dimension of ``q[B, Hq, S, D]`` and ``k[B, Hk, S, D]`` by ``cos`` and ``sin`` of ``[B or 1, S, D]``.

    Only the first half of ``cos`` and ``sin`` is read; the second half repeats it. The rotation is computed in the
    widest dtype of the four tensors; the results have the dtypes of ``q`` and ``k``. With ``unsqueeze_dim=2`` the
    layout is ``[B, S, H, D]``. No gradient reaches ``cos`` and ``sin``.

    Raises:
        ValueError: ``cos`` is not as wide as a head, or ``unsqueeze_dim`` is neither 1 nor 2.
    """
    if cos.shape[-1] != q.shape[-1]:
        raise ValueError(f"cos is {cos.shape[-1]} wide, expected {q.shape[-1]}, the width of a head")
    return partial(q, k, cos, sin, unsqueeze_dim)


def partial(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """As :func:`full`, but rotates only the first ``cos.shape[-1]`` dimensions; the others pass through unchanged."""
    return _rotated(q, k, cos, sin, unsqueeze_dim, cos.shape[-1])


def half_width(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """As :func:`full`, with ``cos`` and ``sin`` of ``[B or 1, S, D/2]``: both halves of a head use the same angles."""
    if 2 * cos.shape[-1] != q.shape[-1]:
        raise ValueError(f"cos is {cos.shape[-1]} wide, expected {q.shape[-1] // 2}, half as wide as a head")
    return _rotated(q, k, cos, sin, unsqueeze_dim, q.shape[-1])


def _rotated(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int, rotary_width: int
) -> tuple[Tensor, Tensor]:
    if unsqueeze_dim not in (1, 2):
        raise ValueError(f"unsqueeze_dim is {unsqueeze_dim}, expected 1 for [B, H, S, D] or 2 for [B, S, H, D]")
    # Liger computes in the dtype of the angles, eager code in the widest of all: promote the angles to that.
    wide = torch.promote_types(torch.promote_types(q.dtype, k.dtype), cos.dtype)
    return _RotaryPosEmb.apply(q, k, cos.to(wide), sin.to(wide), 3 - unsqueeze_dim, rotary_width)


class _RotaryPosEmb(Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions_dim: int, rotary_width: int
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.layout = positions_dim, rotary_width
        return _turn(q, k, cos, sin, positions_dim, rotary_width, False)

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor | None, ...]:
        return *_turn(dq, dk, *ctx.saved_tensors, *ctx.layout, True), None, None, None, None


def _turned(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions_dim: int, rotary_width: int, backward: bool
) -> tuple[Tensor, Tensor]:
    q, k = _copies(q, k, positions_dim)
    cos, sin = _with_plain_strides(cos), _with_plain_strides(sin)
    with torch.cuda.device_of(q):
        # Liger takes [B, H, S, D] and transposes it to [B, S, H, D]: a view of our copies, so it writes into them.
        (_rope_backward if backward else _rope_forward)(
            q.transpose(1, 2), k.transpose(1, 2), cos, sin, rotary_dim=rotary_width
        )
    return q.transpose(1, positions_dim), k.transpose(1, positions_dim)


def _turned_like(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions_dim: int, *_: object) -> tuple[Tensor, ...]:
    return tuple(x.transpose(1, positions_dim) for x in _copies(q, k, positions_dim))


def _copies(q: Tensor, k: Tensor, positions_dim: int) -> tuple[Tensor, Tensor]:
    """Copies of ``q`` and ``k`` as contiguous ``[B, S, H, D]``."""
    q, k = (x.transpose(1, positions_dim).clone(memory_format=torch.contiguous_format) for x in (q, k))
    return q, k


def _with_plain_strides(angles: Tensor) -> Tensor:
    """``angles[B or 1, S, D]``, copied if a row is not ``D`` after the one before it.

    Liger finds a batch's angles by the stride of ``S``. Of one position torch calls any such stride contiguous, so that
    Liger's own ``contiguous()`` copies nothing.
    """
    plain = angles.stride(1) == angles.shape[2]
    return angles if plain else angles.clone(memory_format=torch.contiguous_format)


_turn = operator(
    "veomni_liger::rotary_pos_emb(Tensor q, Tensor k, Tensor cos, Tensor sin, int positions_dim, int rotary_width,"
    " bool backward) -> (Tensor q, Tensor k)",
    _turned,
    _turned_like,
)
