"""rms_norm by ``LigerRMSNormFunction``, with the casting mode and the offset that match each variant.

Casting mode ``llama`` rounds ``x / rms(x)`` to x's dtype before it multiplies by the weight; ``gemma`` multiplies in
float32 and rounds once. So ``cast_after`` is ``gemma`` without an offset. (Liger's own patches use ``llama`` for OLMo 2
and gpt-oss, whose norms are ``cast_after``.) Never in place: in-place backward would overwrite the incoming gradient,
which the residual stream reads too.

``x[..., H]`` is float32, bfloat16 or float16, with any strides; ``H`` is at most 65536 (otherwise ``RuntimeError``).
Gradients reach ``x`` and the weight, in their dtypes. Saved for backward: ``x``, the weight and one float32 per row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from veomni_liger.functions import first_derivative_of
from veomni_liger.loading import part

_apply = first_derivative_of(part("rms_norm", "LigerRMSNormFunction")).apply
_IN_PLACE = False


def standard(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``weight * (x / rms(x))``, with ``x / rms(x)`` rounded to x's dtype first.

    The result has the promoted dtype of ``x`` and ``weight``.
    """
    if torch.promote_types(x.dtype, weight.dtype) != x.dtype:
        # Liger's result always has x's dtype. So with a wider weight, Liger only normalises, and the weight is
        # multiplied here.
        return weight * _apply(x, None, eps, 0.0, "llama", _IN_PLACE)
    return _apply(x, weight, eps, 0.0, "llama", _IN_PLACE)


def cast_after(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``weight * (x / rms(x))`` in float32, rounded to x's dtype at the end."""
    return _apply(x, weight, eps, 0.0, "gemma", _IN_PLACE)


def offset(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``(1 + weight) * (x / rms(x))`` in float32, rounded to x's dtype at the end."""
    return _apply(x, weight, eps, 1.0, "gemma", _IN_PLACE)


def unweighted(x: Tensor, weight: None, eps: float) -> Tensor:
    """``x / rms(x)`` in float32, rounded to x's dtype at the end."""
    return _apply(x, None, eps, 0.0, "gemma", _IN_PLACE)
