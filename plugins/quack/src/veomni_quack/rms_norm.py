"""RMSNorm by QuACK: forward and backward one kernel each, statistics in float32.

QuACK multiplies by the weight in float32 and rounds once, which is ``cast_after``; without a weight it is
``unweighted``, and with ``1 + weight`` handed over in float32 it is ``offset``. ``standard`` rounds before the weight:
in 16 bits the weight is a multiplication after QuACK's norm, and only its backward is one kernel. The gradient of a
weight is a sum of float32 partial sums in a fixed order.
"""

from __future__ import annotations

from typing import Any

import torch
from quack.rmsnorm import rmsnorm_bwd, rmsnorm_fwd
from torch import Tensor

from veomni_core.ops.first_derivatives import first_derivatives_only
from veomni_quack.compiling import check_target

check_target()


def standard(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``weight * (x / rms(x))`` of ``x[..., H]``, with ``x / rms(x)`` rounded to x's dtype first (Llama)."""
    result: Tensor = _RMSNorm.apply(x, weight, eps, x.element_size() == 2)
    return result


def cast_after(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``weight * (x / rms(x))`` of ``x[..., H]`` in float32, rounded once at the end (OLMo 2, gpt-oss)."""
    result: Tensor = _RMSNorm.apply(x, weight, eps, False)
    return result


def offset(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``(1 + weight) * (x / rms(x))`` of ``x[..., H]`` in float32, rounded once at the end (Gemma, Qwen3.5)."""
    result: Tensor = _RMSNorm.apply(x, 1.0 + weight.float(), eps, False)
    return result


def unweighted(x: Tensor, weight: None, eps: float) -> Tensor:
    """``x / rms(x)`` of ``x[..., H]`` in float32, rounded at the end."""
    result: Tensor = _RMSNorm.apply(x, None, eps, False)
    return result


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float, round_before_weight: bool) -> Tensor:
        inside = None if round_before_weight else weight
        normalised, _, rstd = rmsnorm_fwd(_rows(x), inside, out_dtype=x.dtype, eps=eps, store_rstd=True)
        ctx.save_for_backward(x, weight, rstd)
        result: Tensor = weight * normalised if round_before_weight else normalised
        return result.reshape(x.shape)

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, dresult: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        dx, dweight, *_ = rmsnorm_bwd(_rows(x), weight, _rows(dresult), rstd)
        return dx.to(x.dtype).reshape(x.shape), dweight, None, None


def _rows(x: Tensor) -> Tensor:
    """``x`` as contiguous rows ``[M, H]``.

    QuACK reads at least four bytes at a time, so rows of an odd number of 16-bit values are handed over in float32,
    which holds them exactly; everything is computed in float32 anyway.
    """
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    return rows.float() if x.shape[-1] % 2 and x.element_size() == 2 else rows
