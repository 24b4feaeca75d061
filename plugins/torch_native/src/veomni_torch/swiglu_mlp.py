"""swiglu_mlp in plain PyTorch: saves ``gate`` and ``up``, and recomputes the activation in backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from veomni_core.kernels import first_derivatives_only
from veomni_torch import fixed_order


def standard(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up``; shapes ``[..., I]``."""
    return _SiluMul.apply(gate, up)


def gelu_tanh(gate: Tensor, up: Tensor) -> Tensor:
    """``gelu(gate) * up`` with GELU's tanh approximation; shapes ``[..., I]``."""
    return _GeluMul.apply(gate, up, "tanh")


def gelu(gate: Tensor, up: Tensor) -> Tensor:
    """``gelu(gate) * up`` with the exact error function; shapes ``[..., I]``."""
    return _GeluMul.apply(gate, up, "none")


class _SiluMul(Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return fixed_order.silu(gate) * up

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(dy * up, gate), dy * F.silu(gate)


class _GeluMul(Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, approximate: str) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.approximate = approximate
        return fixed_order.gelu(gate, approximate == "tanh") * up

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        dgate = torch.ops.aten.gelu_backward(dy * up, gate, approximate=ctx.approximate)
        return dgate, dy * F.gelu(gate, approximate=ctx.approximate), None
