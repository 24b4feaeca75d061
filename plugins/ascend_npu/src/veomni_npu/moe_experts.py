"""moe_experts by ``npu_moe_token_permute``, ``npu_grouped_matmul``, ``npu_swiglu`` and ``npu_moe_token_unpermute``.

``npu_grouped_matmul`` has no backward in torch_npu, so the layer is an autograd function. It saves the inputs and the
pre-activations. A routing weight's gradient is computed as ``(dresult @ down) · activation``, so forward doesn't save
the experts' outputs.

Limits: fewer than 16777215 routes, at most 512 experts per token and 1024 in all, widths below 65536.

Shapes: T tokens, H hidden size, K experts per token, E experts, I intermediate size, N = T * K rows sorted by expert.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from veomni_core.kernels import first_derivatives_only, product_operands
from veomni_npu.grouped_products import grouped_outer, grouped_product
from veomni_npu.operators import npu


def standard(
    hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor, gate_up_proj: Tensor, down_proj: Tensor
) -> Tensor:
    """Sum over a token's experts of ``weight * down(silu(gate) * up)``.

    ``hidden[T, H]``, ``top_k_index[T, K]``, ``top_k_weights[T, K]``, ``gate_up_proj[E, 2I, H]`` with gate first,
    ``down_proj[E, H, I]``; returns ``[T, H]``. A route whose index is outside ``[0, E)`` is dropped: the last expert
    computes it with a weight of zero, so no size has to be read on the host. Gradients reach all inputs but the index;
    the weights of experts without tokens get zeros. Routing weights are rounded to hidden's dtype. Under autocast,
    hidden and the projections are cast to its dtype, and the result back to hidden's.

    Raises:
        TypeError: hidden and the projections differ in dtype, and autocast is off.
    """
    dtype = hidden.dtype
    hidden, gate_up_proj, down_proj = product_operands(
        "fused_npu", hidden=hidden, gate_up_proj=gate_up_proj, down_proj=down_proj
    )
    if not top_k_index.numel():  # not all of the operators are documented to accept empty tensors
        return _no_routes(hidden, top_k_weights, gate_up_proj, down_proj).to(dtype)
    experts = gate_up_proj.shape[0]
    is_expert = (top_k_index >= 0) & (top_k_index < experts)
    kept_weights = torch.where(is_expert, top_k_weights, 0.0)
    index = torch.where(is_expert, top_k_index, experts - 1)
    result: Tensor = _Experts.apply(hidden, index, kept_weights.to(hidden.dtype), gate_up_proj, down_proj)
    return result.to(dtype)


def _no_routes(hidden: Tensor, top_k_weights: Tensor, gate_up_proj: Tensor, down_proj: Tensor) -> Tensor:
    """Zeros like ``hidden`` that depend on every input, so that each one gets a gradient of zeros."""
    return hidden * 0.0 + (top_k_weights.sum() + gate_up_proj[:0].sum() + down_proj[:0].sum())


class _Experts(Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        rows, place = npu.npu_moe_token_permute(hidden, index)  # [N, H]; place[N] is the row of each route
        ends = _ends(index, gate_up.shape[0])  # [E]
        pre = grouped_product(rows, gate_up.transpose(1, 2), ends)  # [N, 2I]
        outputs = grouped_product(npu.npu_swiglu(pre, -1), down.transpose(1, 2), ends)  # [N, H]
        ctx.save_for_backward(hidden, index, weights, gate_up, down, pre, place, ends)
        return npu.npu_moe_token_unpermute(outputs, place, weights)

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, dresult: Tensor) -> tuple[Tensor | None, ...]:
        hidden, index, weights, gate_up, down, pre, place, ends = ctx.saved_tensors
        # The operator sorts stably, so these rows are in the same order as in forward.
        dresults, _ = npu.npu_moe_token_permute(dresult, index)  # [N, H]
        # [N, 1]: each row's routing weight
        sorted_weights = torch.empty_like(weights).flatten().scatter(0, place.long(), weights.flatten()).unsqueeze(1)
        activation = npu.npu_swiglu(pre, -1)  # [N, I], recomputed instead of saved
        dactivation = grouped_product(dresults, down, ends)  # [N, I], not yet multiplied by the routing weights
        # Row-wise dot products, read back in route order: [T, K].
        dweights = (dactivation.float() * activation.float()).sum(dim=-1)[place.long()].view_as(weights)
        dpre = npu.npu_swiglu_backward(dactivation * sorted_weights, pre, -1)  # [N, 2I]
        dgate_up = ddown = None
        if ctx.needs_input_grad[3]:
            dgate_up = grouped_outer(dpre, npu.npu_moe_token_permute(hidden, index)[0], ends)
        if ctx.needs_input_grad[4]:
            ddown = grouped_outer(dresults, activation * sorted_weights, ends)
        drows = grouped_product(dpre, gate_up, ends)  # [N, H]
        # Weights of one: dpre contains the routing weights already.
        dhidden = npu.npu_moe_token_unpermute(drows, place, torch.ones_like(weights))
        return dhidden, None, dweights.to(weights.dtype), dgate_up, ddown


def _ends(index: Tensor, experts: int) -> Tensor:
    """The end row of each expert: ``[E]``, int64."""
    flat = index.flatten().long()
    counts = torch.zeros(experts, dtype=torch.int64, device=index.device)
    return counts.scatter_add(0, flat, torch.ones_like(flat)).cumsum(0)
