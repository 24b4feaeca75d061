"""Sums the expert rows of each token, in float32 and in a fixed order.

QuACK has no kernel for this, and PyTorch no operator that gathers and sums without first writing the gathered rows,
``K`` times the size of the result. So the sums are plain PyTorch, which ``torch.compile`` fuses into one kernel per
hidden size, ``K`` and dtype, for any number of tokens. If compilation is turned off, or the recompile limit is reached,
the same code runs eagerly.

Shapes: T tokens, H hidden size, K experts per token, N = T * K rows sorted by expert.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from veomni_quack.moe_experts.routing import Routing


def _weighted_sum(rows: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """``[T, H]`` from ``rows[N + 1, H]``, the row of each route ``places[T, K]`` and ``weights[T, K]``."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    # K terms [T, H], added in the order of k.
    terms = (rows[places[:, k]].to(wide) * weights[:, k, None].to(wide) for k in range(places.shape[1]))
    return sum(terms, start=rows.new_zeros((), dtype=wide)).to(rows.dtype)


def _plain_sum(rows: Tensor, places: Tensor) -> Tensor:
    wide = torch.promote_types(rows.dtype, torch.float32)
    terms = (rows[places[:, k]].to(wide) for k in range(places.shape[1]))
    return sum(terms, start=rows.new_zeros((), dtype=wide)).to(rows.dtype)


_compiled_weighted_sum = torch.compile(_weighted_sum)
_compiled_plain_sum = torch.compile(_plain_sum)


def rows_with_a_zero(count: int, like: Tensor) -> Tensor:
    """Uninitialised ``[count + 1, H]`` whose last row is zero: dropped routes point at that row."""
    rows = like.new_empty(count + 1, like.shape[1])
    rows[count].zero_()
    return rows


def weighted_sum_of_rows(rows: Tensor, routing: Routing, weights: Tensor) -> Tensor:
    """``[T, H]``: each token's rows of ``rows[N + 1, H]``, multiplied by ``weights[T, K]`` and summed."""
    return _call(_compiled_weighted_sum, rows, routing.row_of_route, weights)


def sum_of_rows(rows: Tensor, routing: Routing) -> Tensor:
    """``[T, H]``: the sum of each token's rows of ``rows[N + 1, H]``."""
    return _call(_compiled_plain_sum, rows, routing.row_of_route)


def _call(compiled: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    for tensor in tensors:
        torch._dynamo.maybe_mark_dynamic(tensor, 0)  # the number of tokens changes from batch to batch
    with torch.no_grad():
        return compiled(*tensors)
