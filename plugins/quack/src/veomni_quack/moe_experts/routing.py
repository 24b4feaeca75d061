"""Which row of the grouped products belongs to which token, worked out on the device.

A route is one entry of ``top_k_index[T, K]``, numbered ``t * K + k``. Rows are the routes in the order of their
experts, those of one expert in the order of the routes. Indices that are no expert's come last, in no expert's group:
the products neither read nor write their rows. Nothing is read on the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Routing:
    """``N = T * K`` rows in ``E`` groups, int32; tensors of their own, so that each begins aligned."""

    route_of_row: Tensor
    """``[N]``"""
    row_of_route: Tensor
    """``[T, K]``; ``N`` for a dropped route."""
    offsets: Tensor
    """``[E + 1]``: the first row of each expert, and after the last the number of rows that count."""

    @property
    def token_of_row(self) -> Tensor:
        """``[N]``"""
        return self.route_of_row // max(self.row_of_route.shape[1], 1)

    def of_rows(self, by_route: Tensor) -> Tensor:
        """``[N]``: what stands in ``by_route[T, K]`` for each row."""
        return by_route.flatten()[self.route_of_row]

    def of_routes(self, by_row: Tensor) -> Tensor:
        """``[T, K]``: what stands in ``by_row[N]`` for each route, 0 for a dropped one."""
        return torch.cat((by_row, by_row.new_zeros(1)))[self.row_of_route]


def route(top_k_index: Tensor, experts: int) -> Routing:
    """Sort the routes of ``top_k_index[T, K]`` by expert, stably."""
    index = top_k_index.flatten()
    kept = (index >= 0) & (index < experts)
    key = torch.int16 if experts <= torch.iinfo(torch.int16).max else torch.int32  # a radix sort passes over every byte
    sorted_experts, order = torch.where(kept, index, experts).to(key).sort(stable=True)
    boundaries = torch.arange(experts + 1, dtype=key, device=index.device)
    offsets = torch.searchsorted(sorted_experts, boundaries, out_int32=True)
    rows = torch.arange(index.numel(), dtype=torch.int32, device=index.device)
    places = torch.where(sorted_experts < experts, rows, index.numel())
    row_of_route = torch.empty_like(places).scatter_(0, order, places)
    return Routing(order.int(), row_of_route.view(top_k_index.shape), offsets)
