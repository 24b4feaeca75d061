"""Maps rows of the grouped GEMMs to tokens and back; computed on the device, without a host synchronization.

A route is one entry of ``top_k_index[T, K]``, numbered ``t * K + k``. Rows are the routes sorted by expert; routes of
one expert stay in their order. Dropped routes, whose index is outside ``[0, E)``, come last and belong to no expert's
group: the GEMMs neither read nor write their rows.

Shapes: T tokens, K experts per token, E experts, N = T * K routes (and rows).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Routing:
    """The permutation between routes and rows; int32. Three separate tensors, so that each address is aligned."""

    route_of_row: Tensor
    """``[N]``: the route that each row holds."""
    row_of_route: Tensor
    """``[T, K]``: the row that each route was sorted to; ``N`` for a dropped route."""
    offsets: Tensor
    """``[E + 1]``: the first row of each expert; the last entry is the number of routes that were not dropped."""

    @property
    def token_of_row(self) -> Tensor:
        """``[N]``: the token whose route each row holds."""
        return self.route_of_row // max(self.row_of_route.shape[1], 1)

    def of_rows(self, by_route: Tensor) -> Tensor:
        """Reorder ``by_route[T, K]`` to rows: ``[N]``."""
        return by_route.flatten()[self.route_of_row]

    def of_routes(self, by_row: Tensor) -> Tensor:
        """Reorder ``by_row[N]`` to routes: ``[T, K]``, 0 for dropped routes."""
        return torch.cat((by_row, by_row.new_zeros(1)))[self.row_of_route]


def route(top_k_index: Tensor, experts: int) -> Routing:
    """Sort the routes of ``top_k_index[T, K]`` by expert, stably."""
    index = top_k_index.flatten()
    kept = (index >= 0) & (index < experts)
    key = torch.int16 if experts <= torch.iinfo(torch.int16).max else torch.int32  # radix sort: one pass per byte
    # Dropped routes get the key `experts`, so they are sorted behind every expert.
    sorted_experts, order = torch.where(kept, index, experts).to(key).sort(stable=True)
    boundaries = torch.arange(experts + 1, dtype=key, device=index.device)
    offsets = torch.searchsorted(sorted_experts, boundaries, out_int32=True)
    rows = torch.arange(index.numel(), dtype=torch.int32, device=index.device)
    places = torch.where(sorted_experts < experts, rows, index.numel())  # [N]; N for dropped routes
    row_of_route = torch.empty_like(places).scatter_(0, order, places)
    return Routing(order.int(), row_of_route.view(top_k_index.shape), offsets)
