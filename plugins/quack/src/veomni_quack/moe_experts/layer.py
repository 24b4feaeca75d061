"""One call's forward and backward, put together from products that are handed in. Knows no library.

Pre-activations stand interleaved, gate and up of one column side by side, as QuACK's gated products write and read
them; the weights and their gradients keep the contract's layout, gate first, since those products read and write
``[gate; up]`` as two halves of one dimension.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from veomni_quack.moe_experts.routing import Routing, route
from veomni_quack.moe_experts.token_sums import rows_with_a_zero, sum_of_rows, weighted_sum_of_rows


class Products(Protocol):
    """What :mod:`veomni_quack.moe_experts.grouped_gemm` does on a GPU.

    ``offsets[E + 1]`` bounds the rows of each expert; rows beyond the last are neither read nor written.
    ``token_of_row[N]`` says which row of an operand ``[T, ...]`` stands for each of them.
    """

    def gated(
        self, hidden: Tensor, gate_up_proj: Tensor, offsets: Tensor, token_of_row: Tensor
    ) -> tuple[Tensor, Tensor]:
        """``hidden[token] @ gate_up_proj[e].T``, interleaved ``[N, 2I]``, and ``silu(gate) * up``, ``[N, I]``."""

    def gated_backward(
        self,
        dresult: Tensor,
        down_proj: Tensor,
        pre: Tensor,
        weights: Tensor,
        offsets: Tensor,
        token_of_row: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Back through ``weights[N] * (silu(gate) * up) @ down_proj[e].T``.

        The gradient of the pre-activations, interleaved ``[N, 2I]``; ``weights * silu(gate) * up``, ``[N, I]``; and
        the float32 gradient of the weights, ``[N]``.
        """

    def rows(self, rows: Tensor, matrices: Tensor, offsets: Tensor, out: Tensor, interleaved: bool) -> None:
        """``out[N, B] = rows[N, A] @ matrices[e]`` of ``matrices[E, A, B]``; ``rows`` may be interleaved."""

    def gradient(
        self,
        by_token: Tensor,
        rows: Tensor,
        offsets: Tensor,
        token_of_row: Tensor,
        out: Tensor,
        interleaved: bool,
    ) -> None:
        """``out[e] = by_token[token].T @ rows`` over each expert's rows, 0 without any; ``rows`` may be interleaved."""


def forward(
    hidden: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    products: Products,
) -> tuple[Tensor, Tensor, Routing]:
    """The result ``[T, H]``, the pre-activations ``[N, 2I]`` and the routing."""
    routing = route(top_k_index, len(down_proj))
    routes = top_k_index.numel()
    if routes == 0:
        return torch.zeros_like(hidden), hidden.new_empty(0, gate_up_proj.shape[1]), routing
    pre, activated = products.gated(hidden, gate_up_proj, routing.offsets, routing.token_of_row)
    outputs = rows_with_a_zero(routes, like=hidden)
    products.rows(activated, down_proj.mT, routing.offsets, outputs[:routes], interleaved=False)
    return weighted_sum_of_rows(outputs, routing, top_k_weights), pre, routing


def backward(
    dresult: Tensor,
    hidden: Tensor,
    top_k_weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    pre: Tensor,
    routing: Routing,
    projections: bool,
    products: Products,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of hidden, weights and, where ``projections`` says so, both projections; those are empty else.

    Ordered so that ``activated`` and the rows of ``hidden``'s gradient are gone before the largest gradient is made.
    """

    def room(weight: Tensor) -> Tensor:
        return torch.empty_like(weight) if projections else weight.new_empty(0)

    if routing.row_of_route.numel() == 0:
        dweights = torch.zeros_like(top_k_weights)
        return torch.zeros_like(hidden), dweights, room(gate_up_proj).zero_(), room(down_proj).zero_()
    offsets, token_of_row = routing.offsets, routing.token_of_row
    weights = routing.of_rows(top_k_weights).float()
    dpre, activated, dweights = products.gated_backward(dresult, down_proj, pre, weights, offsets, token_of_row)
    ddown = room(down_proj)
    if projections:
        products.gradient(dresult, activated, offsets, token_of_row, out=ddown, interleaved=False)
    del activated
    drows = rows_with_a_zero(len(dpre), like=hidden)
    products.rows(dpre, gate_up_proj, offsets, drows[: len(dpre)], interleaved=True)
    dhidden = sum_of_rows(drows, routing)
    del drows
    dgate_up = room(gate_up_proj)
    if projections:
        products.gradient(hidden, dpre, offsets, token_of_row, out=dgate_up.mT, interleaved=True)
    return dhidden, routing.of_routes(dweights).to(top_k_weights.dtype), dgate_up, ddown
