"""linear on CPUs, with bits that don't depend on the batch; saves its operands."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from veomni_core.kernels import first_derivatives_only, product_operands, without_autocast
from veomni_torch import fixed_order


def standard(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x[..., A] @ weight[B, A].T + bias[B]``; under autocast in its dtype. Gradients are torch's own products.

    Raises:
        TypeError: x, weight and bias differ in dtype, and autocast is off.
    """
    x, weight, bias = product_operands("fixed_order", x=x, weight=weight, bias=bias)
    return _Linear.apply(x, weight, bias)  # type: ignore[no-any-return]


class _Linear(Function):
    @staticmethod
    @without_autocast
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return fixed_order.linear(x.reshape(-1, x.shape[-1]), weight, bias).view(*x.shape[:-1], len(weight))

    @staticmethod
    @first_derivatives_only
    @without_autocast
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        rows = dy.reshape(-1, dy.shape[-1])
        dx = (rows @ weight).view(x.shape) if of_x else None
        dweight = rows.t() @ x.reshape(-1, x.shape[-1]) if of_weight else None
        dbias = rows.sum(0, dtype=torch.float32 if dy.dtype != torch.float64 else None) if of_bias else None
        return dx, dweight, None if dbias is None else dbias.to(dy.dtype)
