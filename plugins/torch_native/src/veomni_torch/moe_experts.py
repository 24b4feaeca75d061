"""Mixture-of-experts MLPs over tokens sorted by expert, with a backward that saves inputs, pre-activations and indices.

Rows of all tokens' routes are gathered once in the order of their experts, so that each expert's rows are one group of
a grouped product. A token's rows are then gathered and summed by a product with its weights, without atomics: results
repeat bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, library
from torch.nn import functional as F

from veomni_core.ops.autocast import autocast_off, product_operands
from veomni_core.ops.contract import compute_dtype
from veomni_core.ops.first_derivatives import first_derivatives_only
from veomni_torch.clamped_activation import clamped_activation
from veomni_torch.grouped_products import grouped_linear, grouped_outer, grouped_product


def standard(
    hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor, gate_up_proj: Tensor, down_proj: Tensor
) -> Tensor:
    """Sum over a token's experts of ``weight * down(silu(gate) * up)``.

    ``hidden[T, H]``, ``top_k_index[T, K]`` (outside ``[0, E)`` is dropped), ``top_k_weights[T, K]``,
    ``gate_up_proj[E, 2I, H]`` with gate first, ``down_proj[E, H, I]``; gives ``[T, H]``. Gradients reach all but the
    index; experts without tokens get zeros. Sums over experts are float32, rounded to hidden's dtype at the end; the
    weights enter them in hidden's dtype. Under autocast all of this is in its dtype, but for the result's.

    Raises:
        TypeError: hidden and the projections differ in dtype, and autocast is off.
    """
    rows, gate_up, down = product_operands("grouped_mm", hidden=hidden, gate_up_proj=gate_up_proj, down_proj=down_proj)
    result: Tensor = _forward(rows, top_k_index, top_k_weights, gate_up, down)[0]
    return result.to(hidden.dtype)


def clamped(
    hidden: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    alpha: float = 1.702,
    limit: float = 7.0,
    interleaved: bool = False,
    up_offset: float = 1.0,
) -> Tensor:
    """gpt-oss's experts: ``(clamp(up) + up_offset) * g * sigmoid(alpha * g)``, ``g = min(gate, limit)``, and biases.

    Shapes as :func:`standard`, ``gate_up_bias[E, 2I]`` and ``down_bias[E, H]``; gate and up are halves of the columns,
    or every other one where ``interleaved``. Gradients reach all tensors but the index. Dtypes as in :func:`standard`;
    biases and the activation are computed in float32.
    """
    dtype = hidden.dtype
    hidden, gate_up_proj, down_proj = product_operands(
        "grouped_mm", hidden=hidden, gate_up_proj=gate_up_proj, down_proj=down_proj
    )
    experts, k = gate_up_proj.shape[0], top_k_index.shape[1]
    order, ends = _sorted_routes(top_k_index, experts)
    # Dropped routes' rows are zero throughout, so that nothing reaches a bias's gradient through them.
    expert = top_k_index.reshape(-1)[order].clamp(0, experts - 1)
    kept = (torch.arange(order.shape[0], device=order.device) < ends[-1]).unsqueeze(1)

    def linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        product = torch.where(kept, grouped_linear(rows.to(weight.dtype), weight, ends), 0.0)
        if bias is None:
            return product
        # A bias's gradient is the sum over its expert's rows: in bfloat16, that of 2700 rows was a quarter off.
        wide = compute_dtype(bias)
        return product.to(wide) + torch.where(kept, bias.to(wide)[expert], 0.0)

    both = linear(hidden[order // k] if k else hidden[:0], gate_up_proj, gate_up_bias)
    activation = clamped_activation(both, alpha, limit, interleaved, up_offset)
    outputs = linear(activation, down_proj, down_bias)
    with autocast_off(hidden.device.type):  # outputs to which a bias was added in float32 are summed so
        return _combine(outputs, _kept(top_k_index, top_k_weights, experts), order, ends).to(dtype)


# The groups' sizes are values that no traced graph can hold, so forward and backward are one opaque operator each.
@library.custom_op("veomni_torch::moe_experts_forward", mutates_args=())
def _forward(
    hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor, gate_up_proj: Tensor, down_proj: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The result, and what backward needs: pre-activations ``[T·K, 2I]``, the order of routes, the ends of groups."""
    k = top_k_index.shape[1]
    order, ends = _sorted_routes(top_k_index, gate_up_proj.shape[0])
    rows = hidden[order // k] if k else hidden[:0]
    pre = grouped_product(rows, gate_up_proj.transpose(1, 2), ends)
    gate, up = pre.chunk(2, dim=-1)
    outputs = grouped_product(F.silu(gate) * up, down_proj.transpose(1, 2), ends)
    weights = _kept(top_k_index, top_k_weights, gate_up_proj.shape[0])
    return _combine(outputs, weights, order, ends), pre, order, ends


@_forward.register_fake
def _(
    hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor, gate_up_proj: Tensor, down_proj: Tensor
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
    pre: Tensor,
    order: Tensor,
    ends: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of hidden, weights, and both projections.

    The weight's gradient is the product of ``dresult`` with the expert's output, taken as
    ``(dresult @ down) · activation``, for which the output need not be kept. Weights are multiplied into rows of width
    ``I``, never of width ``H``.
    """
    tokens, k = top_k_index.shape
    experts = gate_up_proj.shape[0]
    token = order // max(k, 1)
    weights = _kept(top_k_index, top_k_weights, experts).to(hidden.dtype).reshape(-1)[order].unsqueeze(1)
    drows = dresult[token]
    gate, up = pre.chunk(2, dim=-1)
    silu = F.silu(gate)
    activation = silu * up
    dactivation = grouped_product(drows, down_proj, ends)
    dweights = torch.empty(order.shape, dtype=torch.float32, device=order.device)
    dweights[order] = (dactivation.float() * activation.float()).sum(dim=-1)
    dweights = _kept(top_k_index, dweights.view(tokens, k), experts)
    ddown = grouped_outer(drows, activation * weights, ends)
    del drows, activation  # each as large as all routes; nothing below needs them
    dactivation *= weights
    dpre = torch.cat((torch.ops.aten.silu_backward(dactivation * up, gate), dactivation * silu), dim=-1)
    del dactivation, silu
    dgate_up = grouped_outer(dpre, hidden[token], ends)
    ones = _kept(top_k_index, torch.ones((), dtype=torch.float32, device=order.device), experts)
    dhidden = _combine(grouped_product(dpre, gate_up_proj, ends), ones, order, ends)
    return dhidden, dweights.to(top_k_weights.dtype), dgate_up, ddown


@_backward.register_fake
def _(
    dresult: Tensor,
    hidden: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    pre: Tensor,
    order: Tensor,
    ends: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    like = (hidden, top_k_weights, gate_up_proj, down_proj)
    return tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in like)  # type: ignore[return-value]


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs, *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # zeros as large as the pre-activations would be made for their missing gradient


@first_derivatives_only
def _gradients(ctx: Any, dresult: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    dhidden, dweights, dgate_up, ddown = _backward(dresult.contiguous(), *ctx.saved_tensors)
    return dhidden, None, dweights, dgate_up, ddown


_forward.register_autograd(_gradients, setup_context=_save)


def _sorted_routes(top_k_index: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Routes in the order of their experts (equal experts in token order), and where each expert's end, as int32.

    Dropped routes come last, beyond the last end.
    """
    flat = torch.where(_is_expert(top_k_index, experts), top_k_index, experts).reshape(-1)
    ordered, order = torch.sort(flat, stable=True)
    ends = torch.searchsorted(ordered, torch.arange(experts, device=flat.device), right=True)
    return order, ends.to(torch.int32)


def _kept(top_k_index: Tensor, values: Tensor, experts: int) -> Tensor:
    """``values`` of the routes, zero for dropped ones: ``[T, K]``."""
    return torch.where(_is_expert(top_k_index, experts), values, 0.0)


def _is_expert(top_k_index: Tensor, experts: int) -> Tensor:
    return (top_k_index >= 0) & (top_k_index < experts)


def _combine(rows: Tensor, weights: Tensor, order: Tensor, ends: Tensor) -> Tensor:
    """``rows`` in expert order, summed per token with ``weights[T, K]``: ``[T, H]`` of the rows' dtype."""
    tokens, k = weights.shape
    place = torch.empty_like(order)
    place[order] = torch.arange(order.shape[0], device=order.device)
    # A dropped route has no row of its own, and a weight of zero for whichever row it is given.
    place = torch.where(place < ends[-1], place, 0)
    routes = rows[place].view(tokens, k, rows.shape[-1])
    result = torch.bmm(weights.to(rows.dtype).unsqueeze(1), routes).squeeze(1)
    return torch.where(ends[-1] > 0, result, 0.0)
