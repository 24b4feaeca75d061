"""linear with tiles that each sum along the whole width, in one order: a row's bits don't depend on the batch.

Backward is torch's products, which give the same bits in each run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from veomni_core.kernels import first_derivatives_only, product_operands, without_autocast
from veomni_ops.torch_operators import operator
from veomni_triton.linear.products import product

__all__ = ["product", "standard"]

# A graph takes the operator: launches depend on addresses, which are known only when it runs.
_product = operator(
    "veomni_triton::linear(Tensor rows, Tensor weight, Tensor? bias) -> Tensor",
    product,
    lambda rows, weight, _: rows.new_empty(rows.shape[0], weight.shape[0]),
)


def standard(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x[..., A] @ weight[B, A].T + bias[B]``, summed in float32 and rounded once; under autocast in its dtype.

    Raises:
        TypeError: x, weight and bias differ in dtype, and autocast is off.
    """
    x, weight, bias = product_operands("triton", x=x, weight=weight, bias=bias)
    return _Linear.apply(x, weight, bias)  # type: ignore[no-any-return]


class _Linear(Function):
    @staticmethod
    @without_autocast
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x.reshape(-1, x.shape[-1]), weight, bias).view(*x.shape[:-1], len(weight))

    @staticmethod
    @first_derivatives_only
    @without_autocast
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        rows = dy.reshape(-1, dy.shape[-1])
        dx = (rows @ weight).view(x.shape) if of_x else None
        dweight = rows.t() @ x.reshape(-1, x.shape[-1]) if of_weight else None
        return dx, dweight, rows.sum(0, dtype=torch.float32).to(dy.dtype) if of_bias else None
