"""Routes, which are (token, expert) pairs, sorted by expert; and the sum of a token's routes.

Shapes: T tokens, K experts per token, E experts, N = T * K rows sorted by expert.
"""

from __future__ import annotations

import torch
from torch import Tensor

from veomni_ops.contract import compute_dtype


def sorted_routes(top_k_index: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Sorts routes by expert, stably.

    Returns:
        ``order[N]``, the route ``t * K + k`` of each row; and ``ends[E]``, int32, the end row of each expert. Dropped
        routes (index outside ``[0, E)``) come last, after ``ends[-1]``.
    """
    flat = torch.where(_is_expert(top_k_index, experts), top_k_index, experts).reshape(-1)
    ordered, order = torch.sort(flat, stable=True)
    ends = torch.searchsorted(ordered, torch.arange(experts, device=flat.device), right=True)
    return order, ends.to(torch.int32)


def kept(top_k_index: Tensor, values: Tensor, experts: int) -> Tensor:
    """``values`` (``[T, K]`` or a scalar) with zeros for dropped routes: ``[T, K]``."""
    return torch.where(_is_expert(top_k_index, experts), values, 0.0)


def _is_expert(top_k_index: Tensor, experts: int) -> Tensor:
    return (top_k_index >= 0) & (top_k_index < experts)


def combine(rows: Tensor, weights: Tensor, order: Tensor, ends: Tensor, in_fixed_order: bool = False) -> Tensor:
    """The sum of each token's rows in ``rows[N, H]`` (sorted by expert), weighted by ``weights[T, K]``: ``[T, H]``."""
    tokens, k = weights.shape
    place = torch.empty_like(order)  # [N]: the row of each route, the inverse of `order`
    place[order] = torch.arange(order.shape[0], device=order.device)
    # A dropped route's row is uninitialised. It reads row 0 instead, with a weight of zero.
    place = torch.where(place < ends[-1], place, 0)
    routes = rows[place].view(tokens, k, rows.shape[-1])
    if in_fixed_order:  # route by route: a product's bits depend on how many tokens there are
        wide = compute_dtype(rows)
        result = torch.zeros(tokens, rows.shape[-1], dtype=wide, device=rows.device)
        for each in range(k):
            result = result + weights[:, each, None].to(rows.dtype).to(wide) * routes[:, each].to(wide)
        result = result.to(rows.dtype)
    else:
        result = torch.bmm(weights.to(rows.dtype).unsqueeze(1), routes).squeeze(1)
    # If every route was dropped, row 0 is uninitialised too.
    return torch.where(ends[-1] > 0, result, 0.0)
