"""rotary_pos_emb by ``npu_rotary_mul``, one call for queries and one for keys."""

from __future__ import annotations

import torch
from torch import Tensor

from veomni_npu.rotation import rotated


def full(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """Rotate every dimension of ``q[B, Hq, S, D]`` and ``k[B, Hk, S, D]`` by ``cos`` and ``sin`` of ``[B or 1, S, D]``.

    With ``unsqueeze_dim=2`` the layout is ``[B, S, H, D]``. ``cos`` and ``sin`` are in q's dtype or float32; the
    results are in the dtypes of ``q`` and ``k``. No gradient reaches ``cos`` and ``sin``.
    """
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return rotated(q, cos, sin), rotated(k, cos, sin)


def partial(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """As :func:`full`, but rotates only the first ``cos.shape[-1]`` dimensions; the others pass through unchanged."""
    width = cos.shape[-1]
    turned = full(q[..., :width], k[..., :width], cos, sin, unsqueeze_dim)
    first, second = (torch.cat((t, x[..., width:]), dim=-1) for t, x in zip(turned, (q, k), strict=True))
    return first, second
