"""rms_norm by ``LigerRMSNormFunction``, with the casting mode and the offset that match each variant.

``llama`` rounds ``x / rms(x)`` to x's dtype before the weight, ``gemma`` multiplies in float32 and rounds once: so
``cast_after`` is ``gemma`` without an offset. Liger's own table takes ``llama`` for OLMo 2 and gpt-oss, whose norms
are ``cast_after``. Never in place: that would write into a gradient that the residual stream reads too.

``x [..., H]`` has float32, bfloat16 or float16 and any strides, ``H`` is at most 65536, and a wider row raises
``RuntimeError``. Gradients reach ``x`` and the weight, in their dtypes. Saved are ``x``, the weight and one float32 per
row.
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

    The result has the dtype that PyTorch promotes those of ``x`` and ``weight`` to.
    """
    if torch.promote_types(x.dtype, weight.dtype) != x.dtype:
        # Liger's result always has x's dtype; a wider weight multiplies what Liger normalised and rounded.
        return weight * _apply(x, None, eps, 0.0, "llama", _IN_PLACE)  # type: ignore[no-any-return]
    return _apply(x, weight, eps, 0.0, "llama", _IN_PLACE)  # type: ignore[no-any-return]


def cast_after(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``weight * (x / rms(x))`` in float32, rounded to x's dtype at the end."""
    return _apply(x, weight, eps, 0.0, "gemma", _IN_PLACE)  # type: ignore[no-any-return]


def offset(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``(1 + weight) * (x / rms(x))`` in float32, rounded to x's dtype at the end."""
    return _apply(x, weight, eps, 1.0, "gemma", _IN_PLACE)  # type: ignore[no-any-return]


def unweighted(x: Tensor, weight: None, eps: float) -> Tensor:
    """``x / rms(x)`` in float32, rounded to x's dtype at the end."""
    return _apply(x, None, eps, 0.0, "gemma", _IN_PLACE)  # type: ignore[no-any-return]
