"""Mixture-of-experts MLPs over tokens sorted by expert; saves inputs, pre-activations and indices for backward.

A route is one (token, expert) pair. Tokens are gathered once, one row per route, sorted by expert, so that each
expert's rows are one group of a grouped GEMM. The expert outputs of a token are then gathered and summed by a product
with its routing weights. No atomics: results are bitwise reproducible.

Shapes: T tokens, H hidden size, K experts per token, E experts, I intermediate size, N = T * K rows sorted by expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, library
from torch.nn import functional as F

from veomni_core.ops.autocast import autocast_off, product_operands
from veomni_core.ops.contract import compute_dtype
from veomni_core.ops.first_derivatives import first_derivatives_only
from veomni_torch.clamped_activation import clamped_activation
from veomni_torch.grouped_products import grouped_linear, grouped_outer, grouped_product
from veomni_torch.low_rank import (
    Adapter,
    adapter_of,
    add_gradient_of_rows,
    add_low_rank,
    gradients_of_adapter,
    low_rank_linear,
)
from veomni_torch.routes import combine, kept, sorted_routes

_NO_ADAPTER = (None, None, 1.0)


def standard(
    hidden: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    gate_up_lora: Adapter | None = None,
    down_lora: Adapter | None = None,
) -> Tensor:
    """Sum over a token's experts of ``weight * down(silu(gate) * up)``.

    ``hidden[T, H]``, ``top_k_index[T, K]`` (outside ``[0, E)`` is dropped), ``top_k_weights[T, K]``,
    ``gate_up_proj[E, 2I, H]`` with gate first, ``down_proj[E, H, I]``; returns ``[T, H]``. Gradients reach all inputs
    but the index; the weights of experts without tokens get zeros. Sums over experts are float32, rounded to hidden's
    dtype at the end; the routing weights are rounded to hidden's dtype first. Under autocast, hidden, the projections
    and adapters are cast to its dtype, and the result back to hidden's.

    An adapter ``(a[E, r, A], b[E, B, r], scaling)`` is multiplied beside its projection ``[E, B, A]``. A projection that
    requires no gradient costs nothing in backward but the product that reaches hidden.

    Raises:
        TypeError: hidden, the projections and the adapters differ in dtype, and autocast is off.
    """
    rows, gate_up, down, gate_up_lora, down_lora = _operands(hidden, gate_up_proj, down_proj, gate_up_lora, down_lora)
    first, second = gate_up_lora or _NO_ADAPTER, down_lora or _NO_ADAPTER
    result: Tensor = _forward(rows, top_k_index, top_k_weights, gate_up, down, *first, *second)[0]
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
    gate_up_lora: Adapter | None = None,
    down_lora: Adapter | None = None,
) -> Tensor:
    """gpt-oss's experts: ``(clamp(up) + up_offset) * g * sigmoid(alpha * g)``, ``g = min(gate, limit)``, and biases.

    Shapes as in :func:`standard`, and ``gate_up_bias[E, 2I]``, ``down_bias[E, H]``. Gate and up are the two halves of
    the ``2I`` dimension, or alternate if ``interleaved``. Gradients reach all tensors but the index. Adapters and dtypes
    are as in :func:`standard`; biases are added, and the activation is computed, in float32.
    """
    dtype = hidden.dtype
    hidden, gate_up_proj, down_proj, gate_up_lora, down_lora = _operands(
        hidden, gate_up_proj, down_proj, gate_up_lora, down_lora
    )
    experts, k = gate_up_proj.shape[0], top_k_index.shape[1]
    order, ends = sorted_routes(top_k_index, experts)  # [N], [E]
    expert = top_k_index.reshape(-1)[order].clamp(0, experts - 1)  # [N]; clamped, since it indexes biases
    # [N, 1]: the rows of dropped routes are set to zero at every step, so they add nothing to a bias's gradient.
    covered = (torch.arange(order.shape[0], device=order.device) < ends[-1]).unsqueeze(1)

    def linear(rows: Tensor, weight: Tensor, lora: Adapter | None, bias: Tensor | None) -> Tensor:
        rows = rows.to(weight.dtype)
        product = grouped_linear(rows, weight, ends)
        product = product if lora is None else product + low_rank_linear(rows, lora, ends)
        product = torch.where(covered, product, 0.0)
        if bias is None:
            return product
        # A bias's gradient is a sum over its expert's rows: in bfloat16, the sum over 2700 rows was wrong by a quarter.
        wide = compute_dtype(bias)
        return product.to(wide) + torch.where(covered, bias.to(wide)[expert], 0.0)

    # order // k is the token of each row. With k = 0 there are no rows.
    both = linear(hidden[order // k] if k else hidden[:0], gate_up_proj, gate_up_lora, gate_up_bias)  # [N, 2I]
    activation = clamped_activation(both, alpha, limit, interleaved, up_offset)  # [N, I], float32
    outputs = linear(activation, down_proj, down_lora, down_bias)  # [N, H], float32 if there is a bias
    with autocast_off(hidden.device.type):  # autocast would round float32 outputs before they are summed
        return combine(outputs, kept(top_k_index, top_k_weights, experts), order, ends).to(dtype)


# Group sizes are data-dependent, which a traced graph can't represent; so forward and backward are custom operators.
@library.custom_op("veomni_torch::moe_experts_forward", mutates_args=())
def _forward(
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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The result ``[T, H]``, and for backward: pre-activations ``[N, 2I]``, ``order[N]`` and ``ends[E]``."""
    k = top_k_index.shape[1]
    order, ends = sorted_routes(top_k_index, gate_up_proj.shape[0])  # [N], [E]
    rows = hidden[order // k] if k else hidden[:0]  # [N, H]; order // k is the token of each row
    pre = grouped_product(rows, gate_up_proj.transpose(1, 2), ends)  # [N, 2I]
    pre = add_low_rank(pre, rows, adapter_of(gate_up_a, gate_up_b, gate_up_scaling), ends)
    del rows
    gate, up = pre.chunk(2, dim=-1)
    activation = F.silu(gate) * up  # [N, I]
    outputs = grouped_product(activation, down_proj.transpose(1, 2), ends)  # [N, H]
    outputs = add_low_rank(outputs, activation, adapter_of(down_a, down_b, down_scaling), ends)
    weights = kept(top_k_index, top_k_weights, gate_up_proj.shape[0])  # [T, K]
    return combine(outputs, weights, order, ends), pre, order, ends


@_forward.register_fake
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
    """The gradients of hidden ``[T, H]``, routing weights ``[T, K]``, gate_up_proj, down_proj and the parts of adapters.

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
    dactivation = add_gradient_of_rows(dactivation, drows, down_adapter, ends)
    dweights = torch.empty(order.shape, dtype=torch.float32, device=order.device)
    dweights[order] = (dactivation.float() * activation.float()).sum(dim=-1)  # from row order back to route order
    dweights = kept(top_k_index, dweights.view(tokens, k), experts)  # [T, K]
    activation *= weights
    ddown = grouped_outer(drows, activation, ends) if wanted[1] else drows.new_empty(0)  # [E, H, I]
    ddown_adapter = _of_adapter(drows, activation, down_adapter, ends, wanted[3])  # [E, r, I], [E, H, r]
    del drows, activation  # [N, H] and [N, I]; not needed below
    dactivation *= weights
    dpre = torch.cat((torch.ops.aten.silu_backward(dactivation * up, gate), dactivation * silu), dim=-1)  # [N, 2I]
    del dactivation, silu
    rows = hidden[token]  # [N, H]
    dgate_up = grouped_outer(dpre, rows, ends) if wanted[0] else rows.new_empty(0)  # [E, 2I, H]
    dgate_up_adapter = _of_adapter(dpre, rows, gate_up_adapter, ends, wanted[2])  # [E, r, H], [E, 2I, r]
    del rows
    drows = add_gradient_of_rows(grouped_product(dpre, gate_up_proj, ends), dpre, gate_up_adapter, ends)  # [N, H]
    # A token's gradient is the plain sum of its rows' gradients, since dpre contains the routing weights already.
    ones = kept(top_k_index, torch.ones((), dtype=torch.float32, device=order.device), experts)  # [T, K]
    dhidden = combine(drows, ones, order, ends)
    return dhidden, dweights.to(top_k_weights.dtype), dgate_up, ddown, *dgate_up_adapter, *ddown_adapter


def _of_adapter(
    dproduct: Tensor, rows: Tensor, adapter: Adapter | None, ends: Tensor, wanted: bool
) -> tuple[Tensor, Tensor]:
    if adapter is None or not wanted:
        return rows.new_empty(0), rows.new_empty(0)
    return gradients_of_adapter(dproduct, rows, adapter, ends)


@_backward.register_fake
def _(
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
    of_adapters = ((gate_up_a, wanted[2]), (gate_up_b, wanted[2]), (down_a, wanted[3]), (down_b, wanted[3]))
    operands = ((hidden, True), (top_k_weights, True), (gate_up_proj, wanted[0]), (down_proj, wanted[1]), *of_adapters)
    return tuple(  # type: ignore[return-value]
        torch.empty_like(tensor, memory_format=torch.contiguous_format)
        if is_wanted and tensor is not None
        else hidden.new_empty(0)
        for tensor, is_wanted in operands
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, gate_up_a, gate_up_b, gate_up_scaling, down_a, down_b, down_scaling = inputs
    ctx.save_for_backward(*tensors, gate_up_a, gate_up_b, down_a, down_b, *output[1:])
    ctx.scalings = gate_up_scaling, down_scaling
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # otherwise autograd allocates zeros as gradients of the saved outputs


@first_derivatives_only
def _gradients(ctx: Any, dresult: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    _, _, _, gate_up, down, gate_up_a, gate_up_b, _, down_a, down_b, _ = ctx.needs_input_grad
    wanted = [gate_up, down, gate_up_a or gate_up_b, down_a or down_b]
    gradients = _backward(dresult.contiguous(), *ctx.saved_tensors, *ctx.scalings, wanted)
    dhidden, dweights, dgate_up, ddown, dgate_up_a, dgate_up_b, ddown_a, ddown_b = gradients
    return (
        *(dhidden, None, dweights),
        *(dgate_up if gate_up else None, ddown if down else None),
        *(dgate_up_a if gate_up_a else None, dgate_up_b if gate_up_b else None, None),
        *(ddown_a if down_a else None, ddown_b if down_b else None, None),
    )


_forward.register_autograd(_gradients, setup_context=_save)


def _operands(
    hidden: Tensor, gate_up_proj: Tensor, down_proj: Tensor, gate_up_lora: Adapter | None, down_lora: Adapter | None
) -> tuple[Tensor, Tensor, Tensor, Adapter | None, Adapter | None]:
    """The operands of products in one dtype: autocast's, or else their own."""
    gate_up_a, gate_up_b, gate_up_scaling = gate_up_lora or _NO_ADAPTER
    down_a, down_b, down_scaling = down_lora or _NO_ADAPTER
    hidden, gate_up_proj, down_proj, gate_up_a, gate_up_b, down_a, down_b = product_operands(
        "grouped_mm",
        hidden=hidden,
        gate_up_proj=gate_up_proj,
        down_proj=down_proj,
        gate_up_a=gate_up_a,
        gate_up_b=gate_up_b,
        down_a=down_a,
        down_b=down_b,
    )
    gate_up_lora = adapter_of(gate_up_a, gate_up_b, gate_up_scaling)
    return hidden, gate_up_proj, down_proj, gate_up_lora, adapter_of(down_a, down_b, down_scaling)
