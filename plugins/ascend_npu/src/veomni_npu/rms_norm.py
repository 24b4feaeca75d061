"""rms_norm by ``npu_rms_norm``, which multiplies by ``gamma`` in float32 and rounds once.

So ``cast_after`` and ``offset`` are one pass. ``standard`` rounds before it multiplies by the weight, so that product
is a separate pass. ``gamma`` is in x's dtype or float32: CANN documents both for ``aclnnRmsNorm`` and
``aclnnRmsNormGrad`` on Atlas A2 and A3. ``x`` has up to 8 dimensions and any strides.
"""

from __future__ import annotations

import torch
from torch import Tensor

from veomni_npu.operators import npu


def standard(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``weight * (x / rms(x))`` with ``x / rms(x)`` rounded to x's dtype first; shapes ``[..., H]`` and ``[H]``."""
    return weight * unweighted(x, None, eps)


def cast_after(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``weight * (x / rms(x))`` in float32, rounded to x's dtype at the end."""
    return _scaled(x, weight.to(torch.promote_types(x.dtype, weight.dtype)), eps)


def offset(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``(1 + weight) * (x / rms(x))`` in float32, rounded to x's dtype at the end."""
    return _scaled(x, 1.0 + weight.float(), eps)


def unweighted(x: Tensor, weight: None, eps: float) -> Tensor:
    """``x / rms(x)`` in float32, rounded to x's dtype at the end."""
    return _scaled(x, x.new_ones(x.shape[-1]), eps)


def _scaled(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    rows = x if x.dim() > 1 else x.unsqueeze(0)  # the operator doesn't take one-dimensional tensors
    return npu.npu_rms_norm(rows, gamma, eps)[0].view(x.shape)
