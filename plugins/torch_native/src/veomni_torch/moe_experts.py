"""Mixture-of-experts MLPs over tokens sorted by expert; saves inputs, pre-activations and indices for backward.

A route is one (token, expert) pair. Tokens are gathered once, one row per route, sorted by expert, so that each
expert's rows are one group of a grouped GEMM. The expert outputs of a token are then gathered and summed by a product
with its routing weights. No atomics: results are bitwise reproducible.

Shapes: T tokens, H hidden size, K experts per token, E experts, I intermediate size, N = T * K rows sorted by expert.
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
    ``gate_up_proj[E, 2I, H]`` with gate first, ``down_proj[E, H, I]``; returns ``[T, H]``. Gradients reach all inputs
    but the index; the weights of experts without tokens get zeros. Sums over experts are float32, rounded to hidden's
    dtype at the end; the routing weights are rounded to hidden's dtype first. Under autocast, hidden and the
    projections are cast to its dtype, and the result back to hidden's.

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

    Shapes as in :func:`standard`, and ``gate_up_bias[E, 2I]``, ``down_bias[E, H]``. Gate and up are the two halves of
    the ``2I`` dimension, or alternate if ``interleaved``. Gradients reach all tensors but the index. Dtypes as in
    :func:`standard`; biases are added, and the activation is computed, in float32.
    """
    dtype = hidden.dtype
    hidden, gate_up_proj, down_proj = product_operands(
        "grouped_mm", hidden=hidden, gate_up_proj=gate_up_proj, down_proj=down_proj
    )
    experts, k = gate_up_proj.shape[0], top_k_index.shape[1]
    order, ends = _sorted_routes(top_k_index, experts)  # [N], [E]
    expert = top_k_index.reshape(-1)[order].clamp(0, experts - 1)  # [N]; clamped, since it indexes biases
    # [N, 1]: the rows of dropped routes are set to zero at every step, so they add nothing to a bias's gradient.
    kept = (torch.arange(order.shape[0], device=order.device) < ends[-1]).unsqueeze(1)

    def linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        product = torch.where(kept, grouped_linear(rows.to(weight.dtype), weight, ends), 0.0)
        if bias is None:
            return product
        # A bias's gradient is a sum over its expert's rows: in bfloat16, the sum over 2700 rows was wrong by a quarter.
        wide = compute_dtype(bias)
        return product.to(wide) + torch.where(kept, bias.to(wide)[expert], 0.0)

    # order // k is the token of each row. With k = 0 there are no rows.
    both = linear(hidden[order // k] if k else hidden[:0], gate_up_proj, gate_up_bias)  # [N, 2I]
    activation = clamped_activation(both, alpha, limit, interleaved, up_offset)  # [N, I], float32
    outputs = linear(activation, down_proj, down_bias)  # [N, H], float32 if there is a bias
    with autocast_off(hidden.device.type):  # autocast would round float32 outputs before they are summed
        return _combine(outputs, _kept(top_k_index, top_k_weights, experts), order, ends).to(dtype)


# Group sizes are data-dependent, which a traced graph can't represent; so forward and backward are custom operators.
@library.custom_op("veomni_torch::moe_experts_forward", mutates_args=())
def _forward(
    hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor, gate_up_proj: Tensor, down_proj: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The result ``[T, H]``, and for backward: pre-activations ``[N, 2I]``, ``order[N]`` and ``ends[E]``."""
    k = top_k_index.shape[1]
    order, ends = _sorted_routes(top_k_index, gate_up_proj.shape[0])  # [N], [E]
    rows = hidden[order // k] if k else hidden[:0]  # [N, H]; order // k is the token of each row
    pre = grouped_product(rows, gate_up_proj.transpose(1, 2), ends)  # [N, 2I]
    gate, up = pre.chunk(2, dim=-1)
    outputs = grouped_product(F.silu(gate) * up, down_proj.transpose(1, 2), ends)  # [N, H]
    weights = _kept(top_k_index, top_k_weights, gate_up_proj.shape[0])  # [T, K]
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
    """The gradients of hidden ``[T, H]``, routing weights ``[T, K]``, gate_up_proj and down_proj.

    A routing weight's gradient is the dot product of ``dresult`` and the expert's output ``down @ activation``. It is
    computed as ``(dresult @ down) · activation``, so forward doesn't save the expert's output. The routing weights are
    multiplied into rows of width ``I``, never into rows of width ``H``.
    """
    tokens, k = top_k_index.shape
    experts = gate_up_proj.shape[0]
    token = order // max(k, 1)  # [N]: the token of each row
    # [N, 1], rounded to hidden's dtype as in forward
    weights = _kept(top_k_index, top_k_weights, experts).to(hidden.dtype).reshape(-1)[order].unsqueeze(1)
    drows = dresult[token]  # [N, H]
    gate, up = pre.chunk(2, dim=-1)  # [N, I] each
    silu = F.silu(gate)
    activation = silu * up  # recomputed: forward saves only the pre-activations
    dactivation = grouped_product(drows, down_proj, ends)  # [N, I], not yet multiplied by the routing weights
    dweights = torch.empty(order.shape, dtype=torch.float32, device=order.device)
    dweights[order] = (dactivation.float() * activation.float()).sum(dim=-1)  # from row order back to route order
    dweights = _kept(top_k_index, dweights.view(tokens, k), experts)  # [T, K]
    ddown = grouped_outer(drows, activation * weights, ends)  # [E, H, I]
    del drows, activation  # [N, H] and [N, I]; not needed below
    dactivation *= weights
    dpre = torch.cat((torch.ops.aten.silu_backward(dactivation * up, gate), dactivation * silu), dim=-1)  # [N, 2I]
    del dactivation, silu
    dgate_up = grouped_outer(dpre, hidden[token], ends)  # [E, 2I, H]
    # A token's gradient is the plain sum of its rows' gradients, since dpre contains the routing weights already.
    ones = _kept(top_k_index, torch.ones((), dtype=torch.float32, device=order.device), experts)  # [T, K]
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
    ctx.set_materialize_grads(False)  # otherwise autograd allocates zeros as gradients of the saved outputs


@first_derivatives_only
def _gradients(ctx: Any, dresult: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    dhidden, dweights, dgate_up, ddown = _backward(dresult.contiguous(), *ctx.saved_tensors)
    return dhidden, None, dweights, dgate_up, ddown


_forward.register_autograd(_gradients, setup_context=_save)


def _sorted_routes(top_k_index: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Sorts routes by expert, stably.

    Returns:
        ``order[N]``, the route ``t * K + k`` of each row; and ``ends[E]``, int32, the end row of each expert. Dropped
        routes (index outside ``[0, E)``) come last, after ``ends[-1]``.
    """
    flat = torch.where(_is_expert(top_k_index, experts), top_k_index, experts).reshape(-1)
    ordered, order = torch.sort(flat, stable=True)
    ends = torch.searchsorted(ordered, torch.arange(experts, device=flat.device), right=True)
    return order, ends.to(torch.int32)


def _kept(top_k_index: Tensor, values: Tensor, experts: int) -> Tensor:
    """``values`` (``[T, K]`` or a scalar) with zeros for dropped routes: ``[T, K]``."""
    return torch.where(_is_expert(top_k_index, experts), values, 0.0)


def _is_expert(top_k_index: Tensor, experts: int) -> Tensor:
    return (top_k_index >= 0) & (top_k_index < experts)


def _combine(rows: Tensor, weights: Tensor, order: Tensor, ends: Tensor) -> Tensor:
    """The sum of each token's rows in ``rows[N, H]`` (sorted by expert), weighted by ``weights[T, K]``: ``[T, H]``."""
    tokens, k = weights.shape
    place = torch.empty_like(order)  # [N]: the row of each route, the inverse of `order`
    place[order] = torch.arange(order.shape[0], device=order.device)
    # A dropped route's row is uninitialised. It reads row 0 instead, with a weight of zero.
    place = torch.where(place < ends[-1], place, 0)
    routes = rows[place].view(tokens, k, rows.shape[-1])
    result = torch.bmm(weights.to(rows.dtype).unsqueeze(1), routes).squeeze(1)
    # If every route was dropped, row 0 is uninitialised too.
    return torch.where(ends[-1] > 0, result, 0.0)
