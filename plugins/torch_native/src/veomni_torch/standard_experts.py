"""The operators beneath the standard variant of moe_experts: all of forward in one, all of backward in another.

Forward saves its inputs, pre-activations and indices. Shapes: T tokens, H hidden size, K experts per token, E experts,
I intermediate size, r an adapter's rank, N = T * K rows sorted by expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, library
from torch.nn import functional as F

from veomni_core.kernels import first_derivatives_only
from veomni_torch.fixed_order import silu
from veomni_torch.grouped_products import grouped_outer, grouped_product
from veomni_torch.low_rank import adapter_of, add_gradient_of_rows, add_low_rank, gradients_of_adapter, inner_gradient
from veomni_torch.routes import combine, kept, sorted_routes


# Group sizes are data-dependent, which a traced graph can't represent; so forward and backward are custom operators.
@library.custom_op("veomni_torch::moe_experts_forward", mutates_args=())
def standard_experts(
    hidden: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    gate_up_a: Tensor | None,
    gate_up_b: Tensor | None,
    gate_up_scaling: float,
    down_a: Tensor | None,
    down_b: Tensor | None,
    down_scaling: float,
    in_fixed_order: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The result ``[T, H]``, and for backward: pre-activations ``[N, 2I]``, ``order[N]`` and ``ends[E]``.

    Gradients reach hidden, the routing weights, and the projections and adapters that require them.
    """
    k = top_k_index.shape[1]
    order, ends = sorted_routes(top_k_index, gate_up_proj.shape[0])  # [N], [E]
    rows = hidden[order // k] if k else hidden[:0]  # [N, H]; order // k is the token of each row
    pre = grouped_product(rows, gate_up_proj.transpose(1, 2), ends, in_fixed_order)  # [N, 2I]
    pre = add_low_rank(pre, rows, adapter_of(gate_up_a, gate_up_b, gate_up_scaling), ends)
    del rows
    gate, up = pre.chunk(2, dim=-1)
    activation = silu(gate) * up  # [N, I]
    outputs = grouped_product(activation, down_proj.transpose(1, 2), ends, in_fixed_order)  # [N, H]
    outputs = add_low_rank(outputs, activation, adapter_of(down_a, down_b, down_scaling), ends)
    weights = kept(top_k_index, top_k_weights, gate_up_proj.shape[0])  # [T, K]
    return combine(outputs, weights, order, ends, in_fixed_order), pre, order, ends


@standard_experts.register_fake
def _(
    hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor, gate_up_proj: Tensor, *further: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    routes = top_k_index.numel()
    return (
        torch.empty_like(hidden, memory_format=torch.contiguous_format),
        hidden.new_empty(routes, gate_up_proj.shape[1]),
        top_k_index.new_empty(routes, dtype=torch.long),
        top_k_index.new_empty(gate_up_proj.shape[0], dtype=torch.int32),
    )


@library.custom_op("veomni_torch::moe_experts_backward", mutates_args=())
def _backward(
    dresult: Tensor,
    hidden: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    gate_up_a: Tensor | None,
    gate_up_b: Tensor | None,
    down_a: Tensor | None,
    down_b: Tensor | None,
    pre: Tensor,
    order: Tensor,
    ends: Tensor,
    gate_up_scaling: float,
    down_scaling: float,
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of hidden ``[T, H]``, routing weights ``[T, K]``, both projections and both adapters' parts.

    ``wanted`` says of gate_up_proj, down_proj, gate_up's adapter and down's adapter whether theirs are computed. A
    gradient that isn't has no elements.

    A routing weight's gradient is the dot product of ``dresult`` and the expert's output ``down @ activation``. It is
    computed as ``(dresult @ down) · activation``, so forward doesn't save the expert's output. The routing weights are
    multiplied into rows of width ``I``, never into rows of width ``H``.
    """
    tokens, k = top_k_index.shape
    experts = gate_up_proj.shape[0]
    gate_up_adapter = adapter_of(gate_up_a, gate_up_b, gate_up_scaling)
    down_adapter = adapter_of(down_a, down_b, down_scaling)
    token = order // max(k, 1)  # [N]: the token of each row
    # [N, 1], rounded to hidden's dtype as in forward
    weights = kept(top_k_index, top_k_weights, experts).to(hidden.dtype).reshape(-1)[order].unsqueeze(1)
    drows = dresult[token]  # [N, H]
    gate, up = pre.chunk(2, dim=-1)  # [N, I] each
    silu = F.silu(gate)
    activation = silu * up  # recomputed: forward saves only the pre-activations
    dactivation = grouped_product(drows, down_proj, ends)  # [N, I], not yet multiplied by the routing weights
    dinner = inner_gradient(drows, down_adapter, ends)  # [N, r]
    dactivation = add_gradient_of_rows(dactivation, dinner, down_adapter, ends)
    dweights = torch.empty(order.shape, dtype=torch.float32, device=order.device)
    dweights[order] = (dactivation.float() * activation.float()).sum(dim=-1)  # from row order back to route order
    dweights = kept(top_k_index, dweights.view(tokens, k), experts)  # [T, K]
    ddown = grouped_outer(drows, activation * weights, ends) if wanted[1] else drows.new_empty(0)  # [E, H, I]
    ddown_adapter = (drows.new_empty(0), drows.new_empty(0))
    if wanted[3] and down_adapter and dinner is not None:  # [E, r, I], [E, H, r]
        ddown_adapter = gradients_of_adapter(drows, dinner, activation, weights, down_adapter, ends)
    del drows, activation  # [N, H] and [N, I]; not needed below
    dactivation *= weights
    dpre = torch.cat((torch.ops.aten.silu_backward(dactivation * up, gate), dactivation * silu), dim=-1)  # [N, 2I]
    del dactivation, silu
    rows = hidden[token]  # [N, H]
    dgate_up = grouped_outer(dpre, rows, ends) if wanted[0] else rows.new_empty(0)  # [E, 2I, H]
    dinner = inner_gradient(dpre, gate_up_adapter, ends)  # [N, r]
    dgate_up_adapter = (rows.new_empty(0), rows.new_empty(0))
    if wanted[2] and gate_up_adapter and dinner is not None:  # [E, r, H], [E, 2I, r]
        dgate_up_adapter = gradients_of_adapter(dpre, dinner, rows, None, gate_up_adapter, ends)
    del rows
    drows = grouped_product(dpre, gate_up_proj, ends)  # [N, H]
    drows = add_gradient_of_rows(drows, dinner, gate_up_adapter, ends)
    # A token's gradient is the plain sum of its rows' gradients, since dpre contains the routing weights already.
    ones = kept(top_k_index, torch.ones((), dtype=torch.float32, device=order.device), experts)  # [T, K]
    dhidden = combine(drows, ones, order, ends)
    return dhidden, dweights.to(top_k_weights.dtype), dgate_up, ddown, *dgate_up_adapter, *ddown_adapter


@_backward.register_fake
def _(dresult: Tensor, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *others: Any) -> tuple[Tensor, ...]:
    gate_up, down, gate_up_adapter, down_adapter = others[-1]
    wanted = (gate_up, down, gate_up_adapter, gate_up_adapter, down_adapter, down_adapter)
    return tuple(
        torch.empty_like(tensor, memory_format=torch.contiguous_format)
        if is_wanted and tensor is not None
        else hidden.new_empty(0)
        for tensor, is_wanted in ((hidden, True), (top_k_weights, True), *zip(others, wanted, strict=False))
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, gate_up_a, gate_up_b, gate_up_scaling, down_a, down_b, down_scaling, _ = inputs
    ctx.save_for_backward(*tensors, gate_up_a, gate_up_b, down_a, down_b, *output[1:])
    ctx.scalings = gate_up_scaling, down_scaling
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # otherwise autograd allocates zeros as gradients of the saved outputs


@partial(first_derivatives_only, op="moe_experts")
def _gradients(ctx: Any, dresult: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    _, _, _, gate_up, down, gate_up_a, gate_up_b, _, down_a, down_b, *_ = ctx.needs_input_grad
    wanted = [gate_up, down, gate_up_a or gate_up_b, down_a or down_b]
    gradients = _backward(dresult.contiguous(), *ctx.saved_tensors, *ctx.scalings, wanted)
    dhidden, dweights, dgate_up, ddown, dgate_up_a, dgate_up_b, ddown_a, ddown_b = gradients
    return (
        *(dhidden, None, dweights),
        *(dgate_up if gate_up else None, ddown if down else None),
        *(dgate_up_a if gate_up_a else None, dgate_up_b if gate_up_b else None, None),
        *(ddown_a if down_a else None, ddown_b if down_b else None, None, None),
    )


standard_experts.register_autograd(_gradients, setup_context=_save)
