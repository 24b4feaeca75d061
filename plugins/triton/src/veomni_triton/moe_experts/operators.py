"""Forward and backward as operators that ``torch.compile`` doesn't trace into, and how autograd joins them.

Forward saves its inputs, the pre-activations ``[N, 2I]`` (not with ``recompute``), one buffer of indices, and for an
adapter ``N`` rows of its rank. Nothing is read on the host, so a step can be captured as a CUDA graph.

With ``accumulate``, the product's epilogue adds a projection's gradient to the one that its ``.grad`` already holds,
and autograd gets none: no second tensor as large as the weights is allocated. Autograd gets the gradient as usual where
``.grad`` is still ``None``, where hooks wait for it, and under ``torch.autograd.grad``.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, library

from veomni_core.ops.first_derivatives import first_derivatives_only
from veomni_triton.moe_experts.activation import Activation
from veomni_triton.moe_experts.adapters import adapter_of
from veomni_triton.moe_experts.backward import Wanted, backward
from veomni_triton.moe_experts.factors import padded_rank
from veomni_triton.moe_experts.layer import ExpertsLayer
from veomni_triton.moe_experts.routing import routing_size


@library.custom_op("veomni_triton::moe_experts_forward", mutates_args=())
def forward(
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
    gate_up_scaling: float,
    down_scaling: float,
    alpha: float,
    limit: float | None,
    up_offset: float,
    interleaved: bool,
    recompute: bool,
    accumulate: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The result ``[T, H]`` of ``ExpertsLayer``'s operands, and what backward needs.

    Returns:
        The result, pre-activations ``[N, 2I]``, the routing's buffer, and both adapters' inner products ``[N, R]``.
    """
    operands = (hidden, top_k_index, top_k_weights, gate_up_proj, down_proj, gate_up_bias, down_bias)
    factors = (gate_up_a, down_a, gate_up_b, down_b)
    layer = _layer(operands, factors, gate_up_scaling, down_scaling, alpha, limit, up_offset, interleaved)
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
) -> ExpertsLayer:
    """The layer of operands that come one by one, since an operator's schema has no dataclass."""
    gate_up_a, down_a, gate_up_b, down_b = factors
    activation = Activation(alpha, limit, up_offset, interleaved)
    return ExpertsLayer(
        *operands,
        activation=activation,
        gate_up_adapter=adapter_of(gate_up_a, gate_up_b, gate_up_scaling),
        down_adapter=adapter_of(down_a, down_b, down_scaling),
    )


@forward.register_fake
def _(
    hidden: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    gate_up_a: Tensor | None,
    down_a: Tensor | None,
    *_: Any,
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


# Of hidden, routing weights, and gate_up_proj's and down_proj's weight, bias, a and b in turns. It is no list, which
# functionalization refuses of an operator that writes to an operand.
_AllGradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


@library.custom_op("veomni_triton::moe_experts_backward", mutates_args=("gate_up_sum", "down_sum"))
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
    wanted: Sequence[bool],
    gate_up_sum: Tensor | None,
    down_sum: Tensor | None,
) -> _AllGradients:
    """The gradients of all but the index, in the order of the operands.

    Args:
        dresult: ``[T, H]``, contiguous; the operands follow, as in ``forward``.
        pre: ``[N, 2I]``, or ``None`` to compute it again.
        routing: The buffer that forward returned; the inner products ``[N, R]`` follow, and the constants.
        wanted: Which gradients from ``gate_up_proj`` on are computed; the others are empty.
        gate_up_sum: ``[E, 2I, H]``, to which the gradient is added, and which is then returned empty.
        down_sum: ``[E, H, I]``, likewise.
    """
    operands = (hidden, top_k_index, top_k_weights, gate_up_proj, down_proj, gate_up_bias, down_bias)
    factors = (gate_up_a, down_a, gate_up_b, down_b)
    layer = _layer(operands, factors, gate_up_scaling, down_scaling, alpha, limit, up_offset, interleaved)
    places = layer.routing(routing)
    pre = layer.gate_up(places, gate_up_inner)[0] if pre is None else pre
    of_both = Wanted(*wanted[::2]), Wanted(*wanted[1::2])
    inners, sums = (gate_up_inner, down_inner), (gate_up_sum, down_sum)
    dhidden, dweights, of_gate_up, of_down = backward(layer, dresult, pre, places, inners, of_both, sums)
    of_parameters = chain.from_iterable(zip(of_gate_up, of_down, strict=True))
    return dhidden, dweights, *of_parameters  # type: ignore[return-value]


@_backward.register_fake
def _(
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
    wanted: Sequence[bool],
    gate_up_sum: Tensor | None,
    down_sum: Tensor | None,
) -> _AllGradients:
    projections = (gate_up_proj if gate_up_sum is None else None, down_proj if down_sum is None else None)
    others = (gate_up_bias, down_bias, gate_up_a, down_a, gate_up_b, down_b)
    operands = zip((*projections, *others), wanted, strict=True)
    none = hidden.new_empty(0)
    asked = (tensor if is_wanted and tensor is not None else none for tensor, is_wanted in operands)
    given = (hidden, top_k_weights, *asked)
    return tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in given)  # type: ignore[return-value]


_PARAMETERS = slice(3, 11)  # of forward's inputs: both projections, both biases, both adapters' factors


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, gate_up_scaling, down_scaling, alpha, limit, up_offset, interleaved, recompute, ctx.accumulate = inputs
    _, pre, *others = output
    ctx.constants = (gate_up_scaling, down_scaling, alpha, limit, up_offset, interleaved)
    ctx.save_for_backward(*tensors, None if recompute else pre, *others)
    ctx.mark_non_differentiable(pre, *others)
    # Otherwise zeros [N, 2I] would be allocated as the gradient of pre, which has none.
    ctx.set_materialize_grads(False)


@first_derivatives_only
def _gradients(ctx: Any, dresult: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    tensors = ctx.saved_tensors
    wanted = list(ctx.needs_input_grad[_PARAMETERS])
    # 3 and 4 are the projections' positions among forward's inputs. The others are small, and go through autograd.
    sums = [_sum_so_far(ctx, position, tensors[position]) for position in (3, 4)]
    dhidden, dweights, *found = _backward(dresult.contiguous(), *tensors, *ctx.constants, wanted, *sums)
    totals = (*sums, *[None] * 6)
    given = (
        gradient if is_wanted and total is None else None
        for gradient, is_wanted, total in zip(found, wanted, totals, strict=True)
    )
    return dhidden, None, dweights, *given, *[None] * (len(ctx.constants) + 2)


def _sum_so_far(ctx: Any, position: int, weight: Tensor) -> Tensor | None:
    """``weight.grad``, if this backward may add to it without autograd's knowledge; otherwise ``None``."""
    if not (ctx.accumulate and ctx.needs_input_grad[position] and weight.is_leaf):
        return None
    total = weight.grad
    if total is None or not _backward_accumulates(weight):
        return None
    is_awaited = weight._backward_hooks or weight._post_accumulate_grad_hooks
    if is_awaited or total.dtype != weight.dtype or not total.is_contiguous():
        return None
    return total


def _backward_accumulates(weight: Tensor) -> bool:
    """Whether the running backward writes ``weight.grad``: ``torch.autograd.grad`` must leave it unchanged."""
    node = torch.autograd.graph.get_gradient_edge(weight).node
    try:
        return bool(torch._C._will_engine_execute_node(node))  # type: ignore[attr-defined]
    except RuntimeError:  # what torch (2.13) answers for a leaf's node under autograd.grad
        return False


forward.register_autograd(_gradients, setup_context=_save)
