"""rms_norm in Triton. For rows of up to 32 KiB, forward reads ``x`` once, and backward reads ``x`` and ``dy`` once.

Saved for backward are ``x``, the weight and ``1 / rms(x)``, one float32 per row. A row's result and its gradient depend
on that row alone, bit for bit: neither the number of rows nor their addresses change the order of a sum. The weight's
gradient is summed in float32, in an order that the shape and the device's number of multiprocessors fix.

Every variant takes ``x [..., H]`` of float32, bfloat16 or float16, with any strides, a ``weight [H]`` of any of these
dtypes (``None`` if unweighted), and ``eps``, which is added to the mean square. Results are ``[..., H]``; gradients
have their tensor's dtype. Other dtypes raise ``TypeError``, other shapes ``ValueError``, and second derivatives
``RuntimeError``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from veomni_core.kernels import first_derivatives_only
from veomni_triton.rms_norm.operators import rms_norm_forward, rms_norm_gradients, rms_norm_input_gradient

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def standard(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``weight * (x / rms(x))``, with ``x / rms(x)`` rounded to x's dtype first (Llama).

    The result has the dtype to which PyTorch promotes the dtypes of ``x`` and ``weight``.
    """
    _check(x, weight)
    return _RmsNorm.apply(x, weight, eps, 0.0, False, True)


def cast_after(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``weight * (x / rms(x))`` in float32, rounded to x's dtype at the end."""
    _check(x, weight)
    return _RmsNorm.apply(x, weight, eps, 0.0, False, False)


def offset(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``(1 + weight) * (x / rms(x))`` in float32, rounded to x's dtype at the end."""
    _check(x, weight)
    return _RmsNorm.apply(x, weight, eps, 1.0, False, False)


def unweighted(x: Tensor, weight: None, eps: float) -> Tensor:
    """``x / rms(x)`` in float32, rounded to x's dtype at the end."""
    _check(x, weight)
    return _RmsNorm.apply(x, None, eps, 0.0, False, False)


def unweighted_rounded_scale(x: Tensor, weight: None, eps: float) -> Tensor:
    """``x * (1 / rms(x))`` with ``1 / rms(x)`` rounded to x's dtype first."""
    _check(x, weight)
    return _RmsNorm.apply(x, None, eps, 0.0, True, False)


def _check(x: Tensor, weight: Tensor | None) -> None:
    for tensor in (x,) if weight is None else (x, weight):
        if tensor.dtype not in _DTYPES:
            raise TypeError(f"rms_norm takes float32, bfloat16 or float16, not {tensor.dtype}")
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"rms_norm takes x [..., H] with H of at least 1, not {list(x.shape)}")
    if weight is not None and weight.shape != x.shape[-1:]:
        raise ValueError(f"rms_norm takes a weight of shape {list(x.shape[-1:])} for this x, not {list(weight.shape)}")


class _RmsNorm(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        eps: float,
        offset: float,
        round_scale: bool,
        round_normalised: bool,
    ) -> Tensor:
        y, reciprocal = rms_norm_forward(x, weight, eps, offset, round_scale, round_normalised)
        ctx.save_for_backward(x, weight, reciprocal)
        ctx.offset = offset
        return y

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, reciprocal = ctx.saved_tensors
        if ctx.needs_input_grad[1]:
            dx, dweight = rms_norm_gradients(dy, x, weight, reciprocal, ctx.offset)
        else:
            dx, dweight = rms_norm_input_gradient(dy, x, weight, reciprocal, ctx.offset), None
        return dx, dweight, None, None, None, None
