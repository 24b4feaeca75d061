"""rms_norm in plain PyTorch: saves ``x``, the weight and ``1 / rms(x)`` per row; rounds where the variant does.

With ``n = x / rms(x)`` and ``g`` the factor of the variant (``w``, ``1 + w`` or ``1``), the gradient of ``x`` is
``(g·dy - n · mean(g·dy · n)) / rms(x)`` and that of ``w`` the sum over rows of ``dy · n``, all in float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from veomni_core.kernels import first_derivatives_only


def standard(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``weight * (x / rms(x))`` with ``x / rms(x)`` rounded to x's dtype first; shapes ``[..., H]`` and ``[H]``."""
    return _Weighted.apply(x, weight, eps, 0.0, True)


def cast_after(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``weight * (x / rms(x))`` in float32, rounded to x's dtype at the end."""
    return _Weighted.apply(x, weight, eps, 0.0, False)


def offset(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``(1 + weight) * (x / rms(x))`` in float32, rounded to x's dtype at the end."""
    return _Weighted.apply(x, weight, eps, 1.0, False)


def unweighted(x: Tensor, weight: None, eps: float) -> Tensor:
    """``x / rms(x)`` in float32, rounded to x's dtype at the end."""
    return _Unweighted.apply(x, eps, False)


def unweighted_rounded_scale(x: Tensor, weight: None, eps: float) -> Tensor:
    """``x * (1 / rms(x))`` with ``1 / rms(x)`` rounded to x's dtype first."""
    return _Unweighted.apply(x, eps, True)


def _reciprocal_rms(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``x`` in float32, and ``1 / rms(x)`` per row."""
    x = x.float()
    return x, torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


class _Unweighted(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float, round_scale: bool) -> Tensor:
        x32, reciprocal = _reciprocal_rms(x, eps)
        ctx.save_for_backward(x, reciprocal)
        return x * reciprocal.to(x.dtype) if round_scale else rounded(x32 * reciprocal, x.dtype)

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        x, reciprocal = ctx.saved_tensors
        return input_gradient(dy.float(), x.float() * reciprocal, reciprocal).to(x.dtype), None, None


class _Weighted(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, added: float, round_first: bool) -> Tensor:
        x32, reciprocal = _reciprocal_rms(x, eps)
        ctx.save_for_backward(x, weight, reciprocal)
        ctx.added = added
        normalised = x32 * reciprocal
        if round_first:
            return weight * normalised.to(x.dtype)
        return rounded((weight.float() + added) * normalised, x.dtype)

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, reciprocal = ctx.saved_tensors
        normalised, dy = x.float() * reciprocal, dy.float()
        dx = dweight = None
        if ctx.needs_input_grad[1]:
            dweight = (dy * normalised).sum_to_size(weight.shape).to(weight.dtype)
        if ctx.needs_input_grad[0]:
            dx = input_gradient(dy * (weight.float() + ctx.added), normalised, reciprocal).to(x.dtype)
        return dx, dweight, None, None, None


def rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """``values`` in ``dtype``, without a cast if they already have it.

    PyTorch 2.11 compiles a forward that ends in a cast to the same dtype to a function whose gradients are all zero.
    """
    return values if values.dtype == dtype else values.to(dtype)


def input_gradient(dnormalised: Tensor, normalised: Tensor, reciprocal: Tensor) -> Tensor:
    """The gradient of ``x`` from that of ``x / rms(x)``; the formula at the top of this file."""
    projection = (dnormalised * normalised).mean(-1, keepdim=True)
    return (dnormalised - normalised * projection) * reciprocal
