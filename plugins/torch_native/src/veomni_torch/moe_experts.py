"""Mixture-of-experts MLPs over tokens sorted by expert, with a backward that saves inputs, pre-activations and indices.

Rows of all tokens' routes are gathered once in the order of their experts, so that each expert's rows are one slice.
Where the device multiplies groups in one call (``torch.nn.functional.grouped_mm``, bf16 on CUDA from SM80) it does;
elsewhere each slice is one product. Sums over a token's experts are taken in route order: results repeat bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def standard(
    hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor, gate_up_proj: Tensor, down_proj: Tensor
) -> Tensor:
    """Sum over a token's experts of ``weight * down(silu(gate) * up)``.

    ``hidden[T, H]``, ``top_k_index[T, K]`` (``E`` and above is dropped), ``top_k_weights[T, K]``,
    ``gate_up_proj[E, 2I, H]`` with gate first, ``down_proj[E, H, I]``; gives ``[T, H]``. Gradients reach all but the
    index; experts without tokens get zeros. Sums over experts are float32, rounded to hidden's dtype at the end.
    """
    result: Tensor = _forward(hidden, top_k_index, top_k_weights, gate_up_proj, down_proj)[0]
    return result


# The groups' sizes are values that no traced graph can hold, so forward and backward are one opaque operator each.
@torch.library.custom_op("veomni_torch::moe_experts_forward", mutates_args=())
def _forward(
    hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor, gate_up_proj: Tensor, down_proj: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The result, and what backward needs: pre-activations ``[T·K, 2I]``, the order of routes, the ends of groups."""
    tokens, k = top_k_index.shape
    order, ends = _sorted_routes(top_k_index, gate_up_proj.shape[0])
    rows = hidden[order // k] if k else hidden[:0]
    pre = _grouped_product(rows, gate_up_proj.transpose(1, 2), ends)
    gate, up = pre.chunk(2, dim=-1)
    outputs = _grouped_product(F.silu(gate) * up, down_proj.transpose(1, 2), ends)
    weights = _kept_weights(top_k_index, top_k_weights, gate_up_proj.shape[0])[order].unsqueeze(1)
    result = _sum_routes(outputs.float() * weights, order, tokens, k).to(hidden.dtype)
    return result, pre, order, ends


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


@torch.library.custom_op("veomni_torch::moe_experts_backward", mutates_args=())
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
    ``(dresult @ down) · activation``, for which the output need not be kept.
    """
    tokens, k = top_k_index.shape
    token = order // max(k, 1)
    weights = _kept_weights(top_k_index, top_k_weights, gate_up_proj.shape[0])[order].unsqueeze(1)
    drows = dresult[token]
    gate, up = pre.chunk(2, dim=-1)
    silu = F.silu(gate)
    activation = silu * up
    dactivation = _grouped_product(drows, down_proj, ends)
    dweights = torch.empty_like(weights).squeeze(1)
    dweights[order] = (dactivation.float() * activation.float()).sum(dim=-1)
    dweights = torch.where(top_k_index < gate_up_proj.shape[0], dweights.view(tokens, k), 0.0)
    ddown = _grouped_outer(drows * weights.to(drows.dtype), activation, ends)
    dactivation = dactivation * weights.to(dactivation.dtype)
    dpre = torch.cat((torch.ops.aten.silu_backward(dactivation * up, gate), dactivation * silu), dim=-1)
    dgate_up = _grouped_outer(dpre, hidden[token], ends)
    dhidden = _sum_routes(_grouped_product(dpre, gate_up_proj, ends).float(), order, tokens, k).to(hidden.dtype)
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


def _gradients(ctx: Any, dresult: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    dhidden, dweights, dgate_up, ddown = _backward(dresult.contiguous(), *ctx.saved_tensors)
    return dhidden, None, dweights, dgate_up, ddown


_forward.register_autograd(_gradients, setup_context=_save)


def _sorted_routes(top_k_index: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Routes in the order of their experts (equal experts in token order), and where each expert's end, as int32.

    Dropped routes come last, beyond the last end.
    """
    flat = top_k_index.reshape(-1).clamp(max=experts)
    ordered, order = torch.sort(flat, stable=True)
    ends = torch.searchsorted(ordered, torch.arange(experts, device=flat.device), right=True)
    return order, ends.to(torch.int32)


def _kept_weights(top_k_index: Tensor, top_k_weights: Tensor, experts: int) -> Tensor:
    """The weight of each route in float32, zero for a dropped one."""
    return torch.where(top_k_index < experts, top_k_weights.float(), 0.0).reshape(-1)


def _sum_routes(rows: Tensor, order: Tensor, tokens: int, k: int) -> Tensor:
    """Rows in expert order, summed per token in route order; no atomics, so the same bits every time."""
    by_route = torch.empty_like(rows)
    by_route[order] = rows
    return by_route.view(tokens, k, rows.shape[-1]).sum(dim=1)


def _has_grouped_mm(rows: Tensor) -> bool:
    return (
        rows.is_cuda
        and rows.dtype == torch.bfloat16
        and torch.cuda.get_device_capability(rows.device) >= (8, 0)
        and rows.shape[0] > 0
    )


def _grouped_product(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Each expert's slice of ``rows[N, A]`` times its ``matrices[E, A, B]``; rows beyond the last end give zeros."""
    if _has_grouped_mm(rows):
        product = F.grouped_mm(rows, matrices, offs=ends)
        covered = torch.arange(rows.shape[0], device=rows.device) < ends[-1]
        return torch.where(covered.unsqueeze(1), product, 0.0)
    product = rows.new_zeros(rows.shape[0], matrices.shape[2])
    for expert, group in _groups(ends):
        torch.mm(rows[group], matrices[expert], out=product[group])
    return product


def _grouped_outer(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """``left[g].T @ right[g]`` for each expert's slice ``g``: ``[E, A, B]``, zeros for an expert without rows."""
    if _has_grouped_mm(left):
        product = F.grouped_mm(left.t(), right, offs=ends)
        empty = torch.diff(ends, prepend=ends.new_zeros(1)) == 0
        return product.masked_fill(empty[:, None, None], 0.0)
    product = left.new_zeros(ends.shape[0], left.shape[1], right.shape[1])
    for expert, group in _groups(ends):
        torch.mm(left[group].t(), right[group], out=product[expert])
    return product


def _groups(ends: Tensor) -> list[tuple[int, slice]]:
    """The experts that have rows, with their slices; reads the ends on the host."""
    stops = ends.tolist()
    starts = [0, *stops[:-1]]
    return [(e, slice(a, b)) for e, (a, b) in enumerate(zip(starts, stops, strict=True)) if b > a]
