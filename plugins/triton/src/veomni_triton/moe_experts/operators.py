"""Forward and backward as operators that ``torch.compile`` doesn't trace into, and how autograd joins them.

Forward saves its inputs, the pre-activations ``[N, 2I]`` (not with ``recompute``) and one buffer of indices. Nothing is
read on the host, so a step can be captured as a CUDA graph.

With ``accumulate``, the product's epilogue adds a projection's gradient to the one that its ``.grad`` already holds,
and autograd gets none: no second tensor as large as the weights is allocated. Autograd gets the gradient as usual where
``.grad`` is still ``None``, where hooks wait for it, and under ``torch.autograd.grad``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, library

from veomni_core.ops.first_derivatives import first_derivatives_only
from veomni_triton.moe_experts.activation import Activation
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
    alpha: float,
    limit: float | None,
    up_offset: float,
    interleaved: bool,
    recompute: bool,
    accumulate: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The result ``[T, H]``, pre-activations ``[N, 2I]`` and the routing's buffer, of ``ExpertsLayer``'s operands."""
    # An operator's schema has no dataclass, so the activation comes as its four fields.
    operands = (hidden, top_k_index, top_k_weights, gate_up_proj, down_proj, gate_up_bias, down_bias)
    result, pre, routing = ExpertsLayer(*operands, Activation(alpha, limit, up_offset, interleaved)).forward()
    return result, pre, routing.buffer


@forward.register_fake
def _(
    hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor, gate_up_proj: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    routes = top_k_index.numel()
    buffer = routing_size(routes, gate_up_proj.shape[0])
    return (
        torch.empty_like(hidden, memory_format=torch.contiguous_format),
        hidden.new_empty(routes, gate_up_proj.shape[1]),
        top_k_index.new_empty(buffer, dtype=torch.int32),
    )


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
    pre: Tensor | None,
    routing: Tensor,
    alpha: float,
    limit: float | None,
    up_offset: float,
    interleaved: bool,
    projections: bool,
    gate_up_sum: Tensor | None,
    down_sum: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of all but the index, in the order of the operands.

    Args:
        dresult: ``[T, H]``, contiguous; the operands follow, as in ``ExpertsLayer``.
        pre: ``[N, 2I]``, or ``None`` to compute it again.
        routing: The buffer that forward returned.
        projections: Whether the gradients of projections and biases are requested; otherwise they are empty.
        gate_up_sum: ``[E, 2I, H]``, to which the gradient is added, and which is then returned empty.
        down_sum: ``[E, H, I]``, likewise.
    """
    operands = (hidden, top_k_index, top_k_weights, gate_up_proj, down_proj, gate_up_bias, down_bias)
    layer = ExpertsLayer(*operands, Activation(alpha, limit, up_offset, interleaved))
    places = layer.routing(routing)
    pre = layer.gate_up(places)[0] if pre is None else pre
    return layer.backward(dresult, pre, places, projections, (gate_up_sum, down_sum))


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
    pre: Tensor | None,
    routing: Tensor,
    alpha: float,
    limit: float | None,
    up_offset: float,
    interleaved: bool,
    projections: bool,
    gate_up_sum: Tensor | None,
    down_sum: Tensor | None,
) -> tuple[Tensor, ...]:
    none = hidden.new_empty(0)
    weights = (
        gate_up_proj if gate_up_sum is None else None,
        down_proj if down_sum is None else None,
        gate_up_bias,
        down_bias,
    )
    asked = (weight if projections and weight is not None else none for weight in weights)
    return tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in (hidden, top_k_weights, *asked))


_PROJECTION_INPUTS = slice(3, 7)  # of forward's inputs: both projections and both biases


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *tensors, alpha, limit, up_offset, interleaved, recompute, ctx.accumulate = inputs
    _, pre, routing = output
    ctx.constants = (alpha, limit, up_offset, interleaved)
    ctx.save_for_backward(*tensors, None if recompute else pre, routing)
    ctx.mark_non_differentiable(pre, routing)
    # Otherwise zeros [N, 2I] would be allocated as the gradient of pre, which has none.
    ctx.set_materialize_grads(False)


@first_derivatives_only
def _gradients(ctx: Any, dresult: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    *tensors, pre, routing = ctx.saved_tensors
    # All four or none: frozen experts (LoRA beside them, say) skip two of the products.
    projections = any(ctx.needs_input_grad[_PROJECTION_INPUTS])
    # 3 and 4 are the projections' positions among forward's inputs. Biases are small, and go through autograd.
    sums = [_sum_so_far(ctx, position, tensors[position]) for position in (3, 4)]
    found = _backward(dresult.contiguous(), *tensors, pre, routing, *ctx.constants, projections, *sums)
    dhidden, dweights, *rest = found
    given = (
        gradient if projections and tensor is not None and total is None else None
        for gradient, tensor, total in zip(rest, tensors[_PROJECTION_INPUTS], (*sums, None, None), strict=True)
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
