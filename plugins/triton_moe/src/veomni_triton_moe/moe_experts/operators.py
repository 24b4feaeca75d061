"""Forward and backward as operators ``veomni_triton_moe::moe_experts_*``, without autograd.

Nothing is read on the host, so a step can be captured as a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from veomni_ops.torch_operators import operator
from veomni_triton_moe.moe_experts.activation import Activation
from veomni_triton_moe.moe_experts.adapters import adapter_of
from veomni_triton_moe.moe_experts.backward import Wanted, backward
from veomni_triton_moe.moe_experts.factors import padded_rank
from veomni_triton_moe.moe_experts.layer import ExpertsLayer
from veomni_triton_moe.moe_experts.routing import routing_size

# Both adapters' scalings, an Activation's alpha, limit, up_offset and interleaved, and whether launches are fixed.
Constants = tuple[float, float, float, float | None, float, bool, bool]
# Of hidden, routing weights, and gate_up_proj's and down_proj's weight, bias, a and b in turns. It is no list, which
# functionalization refuses of an operator that writes to an operand.
_AllGradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]

_OPERANDS = (
    "Tensor hidden, Tensor top_k_index, Tensor top_k_weights, Tensor gate_up_proj, Tensor down_proj,"
    " Tensor? gate_up_bias, Tensor? down_bias, Tensor? gate_up_a, Tensor? down_a, Tensor? gate_up_b, Tensor? down_b"
)
_CONSTANTS = (
    "float gate_up_scaling, float down_scaling, float alpha, float? limit, float up_offset, bool interleaved,"
    " bool in_fixed_order"
)


def _forward(
    hidden: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    gate_up_a: Tensor | None,
    down_a: Tensor | None,
    gate_up_b: Tensor | None,
    down_b: Tensor | None,
    *constants: float | bool | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The result ``[T, H]`` of ``ExpertsLayer``'s operands, and what backward needs.

    Returns:
        The result, pre-activations ``[N, 2I]``, the routing's buffer, and both adapters' inner products ``[N, R]``.
    """
    operands = (hidden, top_k_index, top_k_weights, gate_up_proj, down_proj, gate_up_bias, down_bias)
    layer = _layer(operands, (gate_up_a, down_a, gate_up_b, down_b), *constants)  # type: ignore[arg-type]
    with torch.cuda.device_of(hidden):
        result, pre, routing, gate_up_inner, down_inner = layer.forward()
    return result, pre, routing.buffer, gate_up_inner, down_inner


def _layer(
    operands: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None],
    factors: Sequence[Tensor | None],
    gate_up_scaling: float,
    down_scaling: float,
    alpha: float,
    limit: float | None,
    up_offset: float,
    interleaved: bool,
    in_fixed_order: bool,
) -> ExpertsLayer:
    """The layer of operands that come one by one, since an operator's schema has no dataclass."""
    gate_up_a, down_a, gate_up_b, down_b = factors
    activation = Activation(alpha, limit, up_offset, interleaved)
    return ExpertsLayer(
        *operands,
        activation=activation,
        gate_up_adapter=adapter_of(gate_up_a, gate_up_b, gate_up_scaling),
        down_adapter=adapter_of(down_a, down_b, down_scaling),
        in_fixed_order=in_fixed_order,
    )


def _forward_fake(
    hidden: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    gate_up_a: Tensor | None,
    down_a: Tensor | None,
    *_: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    routes = top_k_index.numel()
    buffer = routing_size(routes, gate_up_proj.shape[0])
    shapes = ((0,) if a is None else (routes, padded_rank(a.shape[1])) for a in (gate_up_a, down_a))
    gate_up_inner, down_inner = (hidden.new_empty(shape) for shape in shapes)
    return (
        torch.empty_like(hidden, memory_format=torch.contiguous_format),
        hidden.new_empty(routes, gate_up_proj.shape[1]),
        top_k_index.new_empty(buffer, dtype=torch.int32),
        gate_up_inner,
        down_inner,
    )


def _backward(
    dresult: Tensor,
    hidden: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    gate_up_a: Tensor | None,
    down_a: Tensor | None,
    gate_up_b: Tensor | None,
    down_b: Tensor | None,
    pre: Tensor | None,
    routing: Tensor,
    gate_up_inner: Tensor,
    down_inner: Tensor,
    gate_up_scaling: float,
    down_scaling: float,
    alpha: float,
    limit: float | None,
    up_offset: float,
    interleaved: bool,
    in_fixed_order: bool,
    wanted: Sequence[bool],
    gate_up_sum: Tensor | None,
    down_sum: Tensor | None,
) -> _AllGradients:
    """The gradients of all but the index, in the order of the operands.

    Args:
        dresult: ``[T, H]``; the operands follow, as in ``_forward``.
        pre: ``[N, 2I]``, or ``None`` to compute it again.
        routing: The buffer that forward returned; the inner products ``[N, R]`` follow, and the constants.
        wanted: Which gradients from ``gate_up_proj`` on are computed; the others are empty.
        gate_up_sum: ``[E, 2I, H]``, to which the gradient is added, and which is then returned empty.
        down_sum: ``[E, H, I]``, likewise.
    """
    operands = (hidden, top_k_index, top_k_weights, gate_up_proj, down_proj, gate_up_bias, down_bias)
    factors = (gate_up_a, down_a, gate_up_b, down_b)
    constants = (gate_up_scaling, down_scaling, alpha, limit, up_offset, interleaved, in_fixed_order)
    layer = _layer(operands, factors, *constants)
    places = layer.routing(routing)
    of_both = Wanted(*wanted[::2]), Wanted(*wanted[1::2])
    inners, sums = (gate_up_inner, down_inner), (gate_up_sum, down_sum)
    with torch.cuda.device_of(hidden):
        pre = layer.gate_up(places, gate_up_inner)[0] if pre is None else pre
        dhidden, dweights, of_gate_up, of_down = backward(
            layer, dresult.contiguous(), pre, places, inners, of_both, sums
        )
    of_parameters = chain.from_iterable(zip(of_gate_up, of_down, strict=True))
    return dhidden, dweights, *of_parameters  # type: ignore[return-value]


def _backward_fake(
    dresult: Tensor,
    hidden: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    *rest: object,
) -> _AllGradients:
    gate_up_bias, down_bias, gate_up_a, down_a, gate_up_b, down_b = rest[:6]
    wanted, gate_up_sum, down_sum = rest[-3:]
    projections = (gate_up_proj if gate_up_sum is None else None, down_proj if down_sum is None else None)
    others = (gate_up_bias, down_bias, gate_up_a, down_a, gate_up_b, down_b)
    operands = zip((*projections, *others), wanted, strict=True)  # type: ignore[call-overload]
    none = hidden.new_empty(0)
    asked = (tensor if is_wanted and tensor is not None else none for tensor, is_wanted in operands)
    given = (hidden, top_k_weights, *asked)
    return tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in given)  # type: ignore[return-value]


moe_experts_forward = operator(
    f"veomni_triton_moe::moe_experts_forward({_OPERANDS}, {_CONSTANTS})"
    " -> (Tensor result, Tensor pre, Tensor routing, Tensor gate_up_inner, Tensor down_inner)",
    _forward,
    _forward_fake,
)
moe_experts_backward = operator(
    f"veomni_triton_moe::moe_experts_backward(Tensor dresult, {_OPERANDS}, Tensor? pre, Tensor routing,"
    f" Tensor gate_up_inner, Tensor down_inner, {_CONSTANTS}, bool[] wanted, Tensor(a!)? gate_up_sum,"
    " Tensor(b!)? down_sum) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
)
