"""rms_norm_gated in Triton: forward reads ``x`` and the gate once, and backward these and ``dy`` once.

That holds for groups of up to 8192 elements, whatever the row; larger ones are read in pieces, twice. Saved for
backward are the inputs and ``1 / rms`` of each group, one float32. A row's result and its gradients depend on that row
alone, bit for bit: neither the number of rows nor their addresses change the order of a sum. The weight's gradient is
summed in float32, in an order that the shape and the device's number of multiprocessors fix.

Every variant takes ``x [..., H]`` and ``gate [..., H]`` with any strides, ``weight [H]``, each of float32, bfloat16 or
float16, ``eps``, which is added to the mean square, and ``group_size``, the number of neighbouring elements that are
normalised together (``None``: all H). Results are ``[..., H]``; gradients have their tensor's dtype. Other dtypes raise
``TypeError``, other shapes ``ValueError``, and second derivatives ``RuntimeError``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from veomni_core.kernels import first_derivatives_only
from veomni_triton.rms_norm_gated.form import Form
from veomni_triton.rms_norm_gated.operators import (
    rms_norm_gated_forward,
    rms_norm_gated_gradients,
    rms_norm_gated_input_gradients,
)

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_STANDARD = Form(gate_first=False, sigmoid=False, rounded=True)
_SIGMOID = Form(gate_first=False, sigmoid=True, rounded=False)
_GATE_FIRST = Form(gate_first=True, sigmoid=False, rounded=True)


def standard(x: Tensor, gate: Tensor, weight: Tensor, eps: float, group_size: int | None = None) -> Tensor:
    """``weight * (x / rms(x)) * silu(gate)`` in x's dtype; ``x / rms(x)`` is rounded to it first (Qwen3-Next)."""
    return _applied(x, gate, weight, eps, group_size, _STANDARD)


def sigmoid(x: Tensor, gate: Tensor, weight: Tensor, eps: float, group_size: int | None = None) -> Tensor:
    """``weight * (x / rms(x)) * sigmoid(gate)`` in float32, rounded to x's dtype at the end (Kimi Linear)."""
    return _applied(x, gate, weight, eps, group_size, _SIGMOID)


def gate_first(x: Tensor, gate: Tensor, weight: Tensor, eps: float, group_size: int | None = None) -> Tensor:
    """``weight * (y / rms(y))`` of ``y = x * silu(gate)``, with ``y / rms(y)`` rounded to x's dtype first (Mamba 2).

    The result has the dtype to which PyTorch promotes the dtypes of ``x`` and ``weight``.
    """
    return _applied(x, gate, weight, eps, group_size, _GATE_FIRST)


def _applied(x: Tensor, gate: Tensor, weight: Tensor, eps: float, group_size: int | None, form: Form) -> Tensor:
    for tensor in (x, gate, weight):
        if tensor.dtype not in _DTYPES:
            raise TypeError(f"rms_norm_gated takes float32, bfloat16 or float16, not {tensor.dtype}")
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"rms_norm_gated takes x [..., H] with H of at least 1, not {list(x.shape)}")
    if gate.shape != x.shape:
        raise ValueError(f"rms_norm_gated takes a gate of the shape of x, {list(x.shape)}, not {list(gate.shape)}")
    width = x.shape[-1]
    if weight.shape != (width,):
        raise ValueError(f"rms_norm_gated takes a weight of shape {[width]} for this x, not {list(weight.shape)}")
    size = width if group_size is None else group_size
    if size < 1 or width % size:
        raise ValueError(f"rms_norm_gated takes a group_size that divides {width} columns, not {size}")
    return _RmsNormGated.apply(x, gate, weight, eps, width // size, form)


class _RmsNormGated(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, weight: Tensor, eps: float, groups: int, form: Form) -> Tensor:
        y, reciprocal = rms_norm_gated_forward(x, gate, weight, eps, groups, *form)
        ctx.save_for_backward(x, gate, weight, reciprocal)
        ctx.form = form
        return y

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        if ctx.needs_input_grad[2]:
            dx, dgate, dweight = rms_norm_gated_gradients(dy, *saved, *ctx.form)
        else:
            (dx, dgate), dweight = rms_norm_gated_input_gradients(dy, *saved, *ctx.form), None
        return dx, dgate, dweight, None, None, None
