"""swiglu_mlp by Liger's kernels, whose backward overwrites gate and up with their gradients.

Backward passes copies of gate and up to the kernel, so that the saved tensors stay intact. The copies become the
gradients: they take no more memory than the gradients themselves, and cost a pass over gate and up. Only gate and up
are saved for backward.

Shapes are ``[..., I]`` with any strides and ``I`` of at most 65536 (otherwise ``RuntimeError``). The kernels write
every result in gate's dtype, so if the dtypes of gate and up differ, both are promoted first, as eager code promotes
their product.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from veomni_core.kernels import first_derivatives_only
from veomni_liger.loading import part
from veomni_ops.torch_operators import operator

_KERNELS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "silu": (part("swiglu", "swiglu_forward"), part("swiglu", "swiglu_backward")),
    "gelu_tanh": (part("geglu", "geglu_forward"), part("geglu", "geglu_backward")),
}


def standard(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up``; the activation is rounded to up's dtype before the product."""
    return _GatedActivation.apply(*_promoted(gate, up), "silu")


def gelu_tanh(gate: Tensor, up: Tensor) -> Tensor:
    """``gelu(gate) * up`` with the tanh approximation, rounded as in :func:`standard`."""
    return _GatedActivation.apply(*_promoted(gate, up), "gelu_tanh")


def _promoted(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(gate.dtype, up.dtype)
    return gate.to(dtype), up.to(dtype)


class _GatedActivation(Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: str) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return _forward(gate, up, activation)

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return *_gradients(dy, *ctx.saved_tensors, ctx.activation), None


def _activated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    forward, _ = _KERNELS[activation]
    *_, result = forward(gate.contiguous(), up.contiguous())
    return result


def _activated_like(gate: Tensor, *_: object) -> Tensor:
    return torch.empty_like(gate, memory_format=torch.contiguous_format)


def _gradients_of(dy: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    _, backward = _KERNELS[activation]
    dgate, dup = (x.clone(memory_format=torch.contiguous_format) for x in (gate, up))
    backward(dgate, dup, dy.contiguous())
    return dgate, dup


_forward = operator(
    "veomni_liger::gated_activation(Tensor gate, Tensor up, str activation) -> Tensor", _activated, _activated_like
)
_gradients = operator(
    "veomni_liger::gated_activation_gradients(Tensor dy, Tensor gate, Tensor up, str activation)"
    " -> (Tensor dgate, Tensor dup)",
    _gradients_of,
    lambda _, gate, up, activation: (_activated_like(gate), _activated_like(up)),
)
