"""Mixture-of-experts MLPs over tokens sorted by expert, with low-rank adapters beside the weights.

A route is one (token, expert) pair. Tokens are gathered once, one row per route, sorted by expert, so that each
expert's rows are one group of a grouped GEMM. The expert outputs of a token are then gathered and summed by a product
with its routing weights. No atomics: results are bitwise reproducible.

Shapes: T tokens, H hidden size, K experts per token, E experts, I intermediate size, N = T * K rows sorted by expert.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from veomni_core.kernels import autocast_off, product_operands
from veomni_ops.contract import compute_dtype
from veomni_torch.clamped_activation import clamped_activation
from veomni_torch.grouped_products import grouped_bias, grouped_linear
from veomni_torch.low_rank import Adapter, adapter_of, low_rank_linear
from veomni_torch.routes import combine, kept, sorted_routes
from veomni_torch.standard_experts import standard_experts

_NO_ADAPTER = (None, None, 1.0)


def standard(
    hidden: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    gate_up_lora: Adapter | None = None,
    down_lora: Adapter | None = None,
    *,
    in_fixed_order: bool = False,
) -> Tensor:
    """Sum over a token's experts of ``weight * down(silu(gate) * up)``.

    ``hidden[T, H]``, ``top_k_index[T, K]`` (outside ``[0, E)`` is dropped), ``top_k_weights[T, K]``,
    ``gate_up_proj[E, 2I, H]`` with gate first, ``down_proj[E, H, I]``; returns ``[T, H]``. Gradients reach all inputs
    but the index; the weights of experts without tokens get zeros. Sums over experts are float32, rounded to hidden's
    dtype at the end; the routing weights are rounded to hidden's dtype first. Under autocast, hidden, the projections
    and adapters are cast to its dtype, and the result back to hidden's.

    An adapter ``(a[E, r, A], b[E, B, r], scaling)`` is multiplied beside its projection ``[E, B, A]``. In backward, a
    projection that requires no gradient costs only the product that reaches hidden.

    Raises:
        TypeError: hidden, the projections and the adapters differ in dtype, and autocast is off.
    """
    _refuse_adapters(in_fixed_order, gate_up_lora, down_lora)
    rows, gate_up, down, gate_up_lora, down_lora = _operands(hidden, gate_up_proj, down_proj, gate_up_lora, down_lora)
    first, second = gate_up_lora or _NO_ADAPTER, down_lora or _NO_ADAPTER
    result: Tensor = standard_experts(rows, top_k_index, top_k_weights, gate_up, down, *first, *second, in_fixed_order)[
        0
    ]
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
    *,
    in_fixed_order: bool = False,
) -> Tensor:
    """gpt-oss's experts: ``(clamp(up) + up_offset) * g * sigmoid(alpha * g)``, ``g = min(gate, limit)``, and biases.

    Shapes as in :func:`standard`, and ``gate_up_bias[E, 2I]``, ``down_bias[E, H]``. Gate and up are the two halves of
    the ``2I`` dimension, or alternate if ``interleaved``. Gradients reach all tensors but the index. Adapters and
    dtypes are as in :func:`standard`; biases are added, and the activation is computed, in float32.
    """
    _refuse_adapters(in_fixed_order, gate_up_lora, down_lora)
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
        product = grouped_linear(rows, weight, ends, in_fixed_order)
        if lora is not None:
            # In float32: a sum in float16 missed the contract by half, where one expert took all 65 rows.
            product = product.to(compute_dtype(product)) + low_rank_linear(rows, lora, ends)
        if bias is not None:
            # A bias's gradient sums its expert's rows: in bfloat16, the sum over 2700 rows was wrong by a quarter.
            wide = compute_dtype(bias)
            product = product.to(wide) + grouped_bias(bias.to(wide), expert, ends)
        return torch.where(covered, product, 0.0)

    # order // k is the token of each row. With k = 0 there are no rows.
    both = linear(hidden[order // k] if k else hidden[:0], gate_up_proj, gate_up_lora, gate_up_bias)  # [N, 2I]
    activation = clamped_activation(both, alpha, limit, interleaved, up_offset)  # [N, I], float32
    outputs = linear(activation, down_proj, down_lora, down_bias)  # [N, H], float32 if there is a bias
    with autocast_off(hidden.device.type):  # autocast would round float32 outputs before they are summed
        return combine(outputs, kept(top_k_index, top_k_weights, experts), order, ends, in_fixed_order).to(dtype)


standard_in_fixed_order = partial(standard, in_fixed_order=True)
clamped_in_fixed_order = partial(clamped, in_fixed_order=True)


def _refuse_adapters(in_fixed_order: bool, *adapters: Adapter | None) -> None:
    if in_fixed_order and any(each is not None for each in adapters):
        raise ValueError("fixed_order multiplies no adapters of experts; choose grouped_mm (moe_implementation)")


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
