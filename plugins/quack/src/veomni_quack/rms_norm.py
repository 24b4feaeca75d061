"""RMSNorm by QuACK: forward and backward are one kernel each, with float32 statistics.

QuACK multiplies by the weight in float32 and rounds once. That is ``cast_after``; without a weight it is
``unweighted``; with ``1 + weight`` in float32 as the weight it is ``offset``. ``standard`` rounds before it multiplies
by the weight: in 16 bits, forward is QuACK's kernel without a weight followed by a multiplication, and only backward is
one kernel. The weight's gradient adds float32 partial sums in a fixed order.

Shapes: M rows (all dimensions of x but the last), H hidden size.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from quack.rmsnorm import rmsnorm_bwd, rmsnorm_fwd
from torch import Tensor

from veomni_core.kernels import first_derivatives_only
from veomni_ops.torch_operators import operator
from veomni_quack.alignment import readable
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


def _normalised(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """The normalised ``x``, in its shape and dtype, and ``1 / rms(x)`` per row, which backward needs."""
    inside = None if weight is None else readable(weight)
    result, _, rstd = rmsnorm_fwd(_rows(x), inside, out_dtype=x.dtype, eps=eps, store_rstd=True)
    return result.reshape(x.shape), rstd


def _gradients(dresult: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of ``x`` and of the weight; the latter is empty if there is no weight."""
    inside = None if weight is None else readable(weight)
    dx, dweight, *_ = rmsnorm_bwd(_rows(x), inside, _rows(dresult), rstd)
    return dx.to(x.dtype).reshape(x.shape), x.new_empty(0) if dweight is None else dweight


def _rows(x: Tensor) -> Tensor:
    """``x`` as rows ``[M, H]``; a copy only if QuACK can't read ``x`` in place.

    QuACK loads at least four bytes at a time, so rows of an odd number of 16-bit values are cast to float32. The cast
    is exact, and the kernel computes in float32 anyway.
    """
    rows = x.reshape(-1, x.shape[-1])
    return readable(rows.float() if x.shape[-1] % 2 and x.element_size() == 2 else rows)


# Fakes call no QuACK: 0.6 would compile a kernel and launch it on fake tensors.
def _fake_normalised(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(math.prod(x.shape[:-1]), dtype=torch.float32)


def _fake_gradients(dresult: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(0) if weight is None else weight.new_empty(weight.shape)


_forward = operator(
    "veomni_quack::rms_norm(Tensor x, Tensor? weight, float eps) -> (Tensor, Tensor)", _normalised, _fake_normalised
)
_backward = operator(
    "veomni_quack::rms_norm_backward(Tensor dresult, Tensor x, Tensor? weight, Tensor rstd) -> (Tensor, Tensor)",
    _gradients,
    _fake_gradients,
)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float, round_before_weight: bool) -> Tensor:
        # For `standard` in 16 bits the kernel rounds x / rms(x), and the weight is multiplied below.
        normalised, rstd = _forward(x, None if round_before_weight else weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        result: Tensor = weight * normalised if round_before_weight else normalised
        return result

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, dresult: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        dx, dweight = _backward(dresult, x, weight, rstd)
        return dx, None if weight is None else dweight, None, None
