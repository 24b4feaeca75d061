"""Forward and backward of the experts as custom operators, and the autograd formula that connects them.

Saved for backward: the inputs, the pre-activations ``[T * K, 2I]`` and three index tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, library

from veomni_core.kernels import first_derivatives_only
from veomni_quack.moe_experts import grouped_gemm, layer
from veomni_quack.moe_experts.alignment import readable
from veomni_quack.moe_experts.routing import Routing


@library.custom_op("veomni_quack::moe_experts_forward", mutates_args=())
def forward(
    hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor, gate_up_proj: Tensor, down_proj: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The result ``[T, H]``, the pre-activations ``[T * K, 2I]``, and the three tensors of a :class:`Routing`."""
    operands = (readable(hidden), top_k_index, top_k_weights, readable(gate_up_proj), readable(down_proj))
    result, pre, routing = layer.forward(*operands, products=grouped_gemm)
    return result, pre, routing.route_of_row, routing.row_of_route, routing.offsets


@forward.register_fake
def _(
    hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor, gate_up_proj: Tensor, down_proj: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    tokens, k = top_k_index.shape

    def int32(*shape: int) -> Tensor:
        return hidden.new_empty(shape, dtype=torch.int32)

    return (
        hidden.new_empty(hidden.shape),
        hidden.new_empty(tokens * k, gate_up_proj.shape[1]),
        int32(tokens * k),
        int32(tokens, k),
        int32(len(down_proj) + 1),
    )


@library.custom_op("veomni_quack::moe_experts_backward", mutates_args=())
def _backward(
    dresult: Tensor,
    hidden: Tensor,
    top_k_weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    pre: Tensor,
    route_of_row: Tensor,
    row_of_route: Tensor,
    offsets: Tensor,
    projections: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of hidden, routing weights, gate_up_proj and down_proj.

    The projections' gradients are computed only if ``projections`` is True; otherwise they are empty.
    """
    tokens = (readable(dresult), readable(hidden), top_k_weights)
    weights = (readable(gate_up_proj), readable(down_proj))
    routing = Routing(route_of_row, row_of_route, offsets)
    return layer.backward(*tokens, *weights, pre, routing, projections, products=grouped_gemm)


@_backward.register_fake
def _(dresult: Tensor, hidden: Tensor, top_k_weights: Tensor, *others: Any) -> tuple[Tensor, ...]:
    gate_up_proj, down_proj, *_, projections = others
    asked = (weight.shape if projections else (0,) for weight in (gate_up_proj, down_proj))
    return tuple(hidden.new_empty(shape) for shape in (hidden.shape, top_k_weights.shape, *asked))


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    hidden, _, *tensors = inputs
    _, *kept = output  # pre-activations and routing, which forward returns only so that they can be saved
    ctx.save_for_backward(hidden, *tensors, *kept)
    ctx.mark_non_differentiable(*kept)
    ctx.set_materialize_grads(False)  # otherwise autograd allocates zeros as gradients of the saved outputs


@first_derivatives_only
def _gradients(ctx: Any, dresult: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    projections = any(ctx.needs_input_grad[3:5])
    dhidden, dweights, dgate_up, ddown = _backward(dresult, *ctx.saved_tensors, projections)
    return dhidden, None, dweights, *((dgate_up, ddown) if projections else (None, None))


forward.register_autograd(_gradients, setup_context=_save)
