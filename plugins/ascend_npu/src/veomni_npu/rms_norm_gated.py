"""rms_norm_gated by ``npu_rms_norm`` and ``npu_rms_norm_backward``, with the gate in PyTorch's own operators.

``npu_rms_norm`` rounds to the dtype of what it is given. ``standard`` rounds there too, so ``x`` goes in as it is; the
other variants don't, so they hand it float32. Its ``gamma`` is ones: all groups of a row would share it, and two
variants round before they multiply by the weight.

Saved are the inputs and ``1 / rms`` of each group. ``x`` has up to 7 dimensions and any strides.

Shapes: H width of a row, G groups of a row, W width of a group, ``H = G * W``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from veomni_core.kernels import first_derivatives_only
from veomni_npu.operators import npu


def standard(x: Tensor, gate: Tensor, weight: Tensor, eps: float, group_size: int | None = None) -> Tensor:
    """``weight * (x / rms(x)) * silu(gate)``; ``x / rms(x)`` is rounded to x's dtype, and so is the result.

    ``x[..., H]``, ``gate[..., H]`` and ``weight[H]``; each ``group_size`` neighbours of a row have an rms of their own.
    Returns ``[..., H]`` in x's dtype, with gradients of all three.
    """
    return _GatedAfter.apply(x, gate, weight, eps, group_size or x.shape[-1], True)


def sigmoid(x: Tensor, gate: Tensor, weight: Tensor, eps: float, group_size: int | None = None) -> Tensor:
    """``weight * (x / rms(x)) * sigmoid(gate)``, rounded once at the end; otherwise as :func:`standard`."""
    return _GatedAfter.apply(x, gate, weight, eps, group_size or x.shape[-1], False)


def gate_first(x: Tensor, gate: Tensor, weight: Tensor, eps: float, group_size: int | None = None) -> Tensor:
    """``weight * (y / rms(y))`` of ``y = x * silu(gate)``, rounded before the weight; otherwise as :func:`standard`."""
    return _GatedBefore.apply(x, gate, weight, eps, group_size or x.shape[-1])


class _GatedAfter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, weight: Tensor, eps: float, size: int, silu: bool) -> Tensor:
        normalised, reciprocal = _normalised(x if silu else x.float(), eps, size)
        ctx.save_for_backward(x, gate, weight, reciprocal)
        ctx.size, ctx.silu = size, silu
        factor = F.silu(gate.float()) if silu else torch.sigmoid(gate.float())
        return (weight * normalised * factor).to(x.dtype)

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, weight, reciprocal = ctx.saved_tensors
        dy, gate32 = dy.float(), gate.float()
        normalised = _scaled(x, reciprocal, ctx.size)  # float32, without standard's rounding
        factor = F.silu(gate32) if ctx.silu else torch.sigmoid(gate32)
        dx = dgate = dweight = None
        if ctx.needs_input_grad[1]:
            dfactor = dy * weight * normalised
            slope = torch.ops.aten.silu_backward if ctx.silu else torch.ops.aten.sigmoid_backward
            dgate = slope(dfactor, gate32 if ctx.silu else factor).to(gate.dtype)
        dweighted = dy * factor
        if ctx.needs_input_grad[2]:
            dweight = (dweighted * normalised).sum_to_size(weight.shape).to(weight.dtype)
        if ctx.needs_input_grad[0]:
            dx = _input_gradient(dweighted * weight, x if ctx.silu else x.float(), reciprocal, ctx.size).to(x.dtype)
        return dx, dgate, dweight, None, None, None


class _GatedBefore(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, weight: Tensor, eps: float, size: int) -> Tensor:
        normalised, reciprocal = _normalised(x * F.silu(gate.float()), eps, size)  # the product is in float32
        ctx.save_for_backward(x, gate, weight, reciprocal)
        ctx.size = size
        return weight * normalised.to(x.dtype)

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, weight, reciprocal = ctx.saved_tensors
        dy, gate32 = dy.float(), gate.float()
        factor = F.silu(gate32)
        gated = x * factor
        dx = dgate = dweight = None
        if ctx.needs_input_grad[2]:
            dweight = (dy * _scaled(gated, reciprocal, ctx.size)).sum_to_size(weight.shape).to(weight.dtype)
        dgated = _input_gradient(dy * weight, gated, reciprocal, ctx.size)
        if ctx.needs_input_grad[0]:
            dx = (dgated * factor).to(x.dtype)
        if ctx.needs_input_grad[1]:
            dgate = torch.ops.aten.silu_backward(dgated * x, gate32).to(gate.dtype)
        return dx, dgate, dweight, None, None


def _normalised(x: Tensor, eps: float, size: int) -> tuple[Tensor, Tensor]:
    """``x / rms(x)`` of each group, ``[..., H]`` rounded to x's dtype, and ``1 / rms``, ``[..., G, 1]`` in float32."""
    normalised, reciprocal = npu.npu_rms_norm(_groups(x, size), x.new_ones(size), eps)
    return normalised.flatten(-2), reciprocal


def _input_gradient(dnormalised: Tensor, x: Tensor, reciprocal: Tensor, size: int) -> Tensor:
    """The gradient ``[..., H]`` of what was normalised. The operator takes both in one dtype, here that of ``x``."""
    dgroups = _groups(dnormalised.to(x.dtype), size)
    return npu.npu_rms_norm_backward(dgroups, _groups(x, size), x.new_ones(size), reciprocal)[0].flatten(-2)


def _scaled(x: Tensor, reciprocal: Tensor, size: int) -> Tensor:
    """``x / rms(x)`` of each group, ``[..., H]`` in float32."""
    return (_groups(x, size) * reciprocal).flatten(-2)


def _groups(x: Tensor, size: int) -> Tensor:
    """``[..., H]`` as ``[..., G, W]``."""
    return x.unflatten(-1, (x.shape[-1] // size, size))
