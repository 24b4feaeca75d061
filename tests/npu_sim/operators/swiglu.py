"""npu_swiglu: halves A and B of the input along ``dim`` give ``A * sigmoid(A) * B``."""

from __future__ import annotations

import torch
from torch import Tensor

from npu_sim.operators.limits import require, require_dims, require_dtype

NAME = "npu_swiglu"
SCHEMAS = {
    "npu_swiglu": "(Tensor input, int dim=-1) -> Tensor",
    "npu_swiglu_backward": "(Tensor grad_output, Tensor input, int dim=-1) -> Tensor",
}


def npu_swiglu(x: Tensor, dim: int = -1) -> Tensor:
    """Half as wide as ``x`` along ``dim``, in its dtype, computed in float32. Limits: 1 to 8 dimensions."""
    require_dtype(NAME, "self", x)
    require_dims(NAME, "self", x, tuple(range(1, 9)))
    require(x.shape[dim] % 2 == 0, f"{NAME}: dimension {dim} has odd size {x.shape[dim]}, which can't be halved")
    gate, up = x.float().chunk(2, dim)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)


def npu_swiglu_backward(grad_output: Tensor, x: Tensor, dim: int = -1) -> Tensor:
    """The gradient of ``x``, in its shape and dtype."""
    gate, up = x.float().chunk(2, dim)
    grad, sigmoid = grad_output.float(), gate.sigmoid()
    dgate = grad * up * sigmoid * (1 + gate * (1 - sigmoid))
    return torch.cat((dgate, grad * gate * sigmoid), dim).to(x.dtype)


META = KERNELS = {"npu_swiglu": npu_swiglu, "npu_swiglu_backward": npu_swiglu_backward}


def _save(ctx, inputs, output) -> None:
    x, ctx.dim = inputs
    ctx.save_for_backward(x)


def _gradients(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
    return torch.ops.npu.npu_swiglu_backward(grad, *ctx.saved_tensors, ctx.dim), None


AUTOGRAD = {"npu_swiglu": (_save, _gradients)}
