"""rms_norm_gated in plain PyTorch: saves its inputs and ``1 / rms`` of each group, and rounds where the variant does.

Backward is that of :mod:`veomni_torch.rms_norm` on each group, with the gate's factor, its SiLU or its sigmoid, before
or after the norm. All arithmetic is in float32.

Shape suffixes: ``G`` groups of a row, ``W`` width of a group; ``x[..., H]`` is ``x[..., G, W]`` with ``H = G * W``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from veomni_core.kernels import first_derivatives_only
from veomni_ops.contract import compute_dtype
from veomni_torch import fixed_order
from veomni_torch.rms_norm import input_gradient, rounded


def standard(x: Tensor, gate: Tensor, weight: Tensor, eps: float, group_size: int | None = None) -> Tensor:
    """``weight * (x / rms(x)) * silu(gate)``; ``x / rms(x)`` is rounded to x's dtype, and so is the result.

    ``x[..., H]``, ``gate[..., H]`` and ``weight[H]``; each ``group_size`` neighbours of a row have an rms of their own.
    Returns ``[..., H]`` in x's dtype, with gradients of all three.
    """
    return _GatedAfter.apply(x, gate, weight, eps, group_size or x.shape[-1], True)  # type: ignore[no-any-return]


def sigmoid(x: Tensor, gate: Tensor, weight: Tensor, eps: float, group_size: int | None = None) -> Tensor:
    """``weight * (x / rms(x)) * sigmoid(gate)``, rounded once at the end; otherwise as :func:`standard`."""
    return _GatedAfter.apply(x, gate, weight, eps, group_size or x.shape[-1], False)  # type: ignore[no-any-return]


def gate_first(x: Tensor, gate: Tensor, weight: Tensor, eps: float, group_size: int | None = None) -> Tensor:
    """``weight * (y / rms(y))`` of ``y = x * silu(gate)``, rounded before the weight; otherwise as :func:`standard`."""
    return _GatedBefore.apply(x, gate, weight, eps, group_size or x.shape[-1])  # type: ignore[no-any-return]


class _GatedAfter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, weight: Tensor, eps: float, size: int, silu: bool) -> Tensor:
        x_GW = _wide_groups(x, size)
        reciprocal_G1 = _reciprocal_rms(x_GW, eps)
        ctx.save_for_backward(x, gate, weight, reciprocal_G1)
        ctx.size, ctx.silu = size, silu
        normalised = (x_GW * reciprocal_G1).flatten(-2)
        # SiLU's variant rounds before the weight, sigmoid's does not.
        weighted = weight * rounded(normalised, x.dtype) if silu else weight.to(normalised.dtype) * normalised
        return rounded(weighted * _activation(gate, silu), x.dtype)

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, weight, reciprocal_G1 = ctx.saved_tensors
        x_GW = _wide_groups(x, ctx.size)
        normalised, wide = (x_GW * reciprocal_G1).flatten(-2), x_GW.dtype
        dy, weight32 = dy.to(wide), weight.to(wide)
        dx = dgate = dweight = None
        if ctx.needs_input_grad[1]:
            dgate = (dy * weight32 * normalised * _slope(gate, ctx.silu)).to(gate.dtype)
        dy = dy * _activation(gate, ctx.silu)  # of the weighted norm
        if ctx.needs_input_grad[2]:
            dweight = (dy * normalised).sum_to_size(weight.shape).to(weight.dtype)
        if ctx.needs_input_grad[0]:
            dx = _input_gradient(dy * weight32, normalised, reciprocal_G1, ctx.size).to(x.dtype)
        return dx, dgate, dweight, None, None, None


class _GatedBefore(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, weight: Tensor, eps: float, size: int) -> Tensor:
        gated_GW = _wide_groups(x, size) * _groups(_activation(gate, True), size)
        reciprocal_G1 = _reciprocal_rms(gated_GW, eps)
        ctx.save_for_backward(x, gate, weight, reciprocal_G1)
        ctx.size = size
        return weight * rounded((gated_GW * reciprocal_G1).flatten(-2), x.dtype)

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, weight, reciprocal_G1 = ctx.saved_tensors
        activated = _activation(gate, True)
        x32 = x.to(activated.dtype)
        normalised = (_groups(x32 * activated, ctx.size) * reciprocal_G1).flatten(-2)
        dy = dy.to(normalised.dtype)
        dx = dgate = dweight = None
        if ctx.needs_input_grad[2]:
            dweight = (dy * normalised).sum_to_size(weight.shape).to(weight.dtype)
        dgated = _input_gradient(dy * weight.to(dy.dtype), normalised, reciprocal_G1, ctx.size)
        if ctx.needs_input_grad[0]:
            dx = (dgated * activated).to(x.dtype)
        if ctx.needs_input_grad[1]:
            dgate = (dgated * x32 * _slope(gate, True)).to(gate.dtype)
        return dx, dgate, dweight, None, None


def _groups(x: Tensor, size: int) -> Tensor:
    """``[..., H]`` as ``[..., G, W]``."""
    return x.unflatten(-1, (x.shape[-1] // size, size))


def _wide_groups(x: Tensor, size: int) -> Tensor:
    return _groups(x.to(compute_dtype(x)), size)


def _reciprocal_rms(x_GW: Tensor, eps: float) -> Tensor:
    """``1 / rms`` of each group, ``[..., G, 1]``."""
    return torch.rsqrt(x_GW.pow(2).mean(-1, keepdim=True) + eps)


def _input_gradient(dnormalised: Tensor, normalised: Tensor, reciprocal_G1: Tensor, size: int) -> Tensor:
    """The gradient ``[..., H]`` of what was normalised."""
    return input_gradient(_groups(dnormalised, size), _groups(normalised, size), reciprocal_G1).flatten(-2)


def _activation(gate: Tensor, silu: bool) -> Tensor:
    """SiLU or the sigmoid of the gate, in float32."""
    wide = gate.to(compute_dtype(gate))
    return fixed_order.silu(wide) if silu else fixed_order.sigmoid(wide)


def _slope(gate: Tensor, silu: bool) -> Tensor:
    """The derivative of :func:`_activation`."""
    wide = gate.to(compute_dtype(gate))
    share = torch.sigmoid(wide)
    return share * (1 + wide * (1 - share)) if silu else share * (1 - share)
