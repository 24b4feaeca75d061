"""Forward and backward of the experts. Imports no kernel library: the GEMMs are passed in.

Pre-activations are interleaved, ``gate_0, up_0, gate_1, up_1, ...``, as QuACK's gated GEMMs write and read them. The
weights and their gradients keep the contract's layout, all of gate before up: the GEMMs convert between the two.

Shapes: T tokens, H hidden size, K experts per token, E experts, I intermediate size, N = T * K rows sorted by expert.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from veomni_quack.moe_experts.routing import Routing, route
from veomni_quack.moe_experts.token_sums import rows_with_a_zero, sum_of_rows, weighted_sum_of_rows


class Products(Protocol):
    """The four grouped GEMMs; on a GPU :mod:`veomni_quack.moe_experts.grouped_gemm`.

    Expert ``e`` has the rows ``offsets[e]:offsets[e + 1]``; rows from ``offsets[E]`` on (dropped routes) are neither
    read nor written. ``token_of_row[N]`` gathers rows from an operand ``[T, ...]``.
    """

    def gated(
        self, hidden: Tensor, gate_up_proj: Tensor, offsets: Tensor, token_of_row: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The gate and up projection, and SwiGLU.

        Args:
            hidden: ``[T, H]``.
            gate_up_proj: ``[E, 2I, H]``.

        Returns:
            ``hidden[token_of_row] @ gate_up_proj[e].T``, interleaved ``[N, 2I]``; and ``silu(gate) * up``, ``[N, I]``.
        """

    def gated_backward(
        self,
        dresult: Tensor,
        down_proj: Tensor,
        pre: Tensor,
        weights: Tensor,
        offsets: Tensor,
        token_of_row: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Backward of ``weights * (silu(gate) * up) @ down_proj[e].T``, except for down_proj's gradient.

        Args:
            dresult: ``[T, H]``.
            down_proj: ``[E, H, I]``.
            pre: The pre-activations, interleaved ``[N, 2I]``.
            weights: The routing weights by row, ``[N]``, float32.

        Returns:
            The gradient of the pre-activations, interleaved ``[N, 2I]``; ``weights * silu(gate) * up``, ``[N, I]``;
            and the float32 gradient of ``weights``, ``[N]``.
        """

    def rows(self, rows: Tensor, matrices: Tensor, offsets: Tensor, out: Tensor, interleaved: bool) -> None:
        """``out[N, B] = rows[N, A] @ matrices[e]`` with ``matrices[E, A, B]``; ``rows`` may be interleaved."""

    def gradient(
        self,
        by_token: Tensor,
        rows: Tensor,
        offsets: Tensor,
        token_of_row: Tensor,
        out: Tensor,
        interleaved: bool,
    ) -> None:
        """``out[e] = by_token[token_of_row].T @ rows`` over each expert's rows; zeros for an expert without rows.

        Args:
            by_token: ``[T, A]``.
            rows: ``[N, B]``.
            out: ``[E, A, B]``.
            interleaved: The columns of ``rows`` are interleaved; those of ``out`` are gate first, then up.
        """


def forward(
    hidden: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    products: Products,
) -> tuple[Tensor, Tensor, Routing]:
    """The result ``[T, H]``, the pre-activations, interleaved ``[N, 2I]``, and the routing."""
    routing = route(top_k_index, len(down_proj))
    routes = top_k_index.numel()
    if routes == 0:
        return torch.zeros_like(hidden), hidden.new_empty(0, gate_up_proj.shape[1]), routing
    # [N, 2I] and [N, I]
    pre, activated = products.gated(hidden, gate_up_proj, routing.offsets, routing.token_of_row)
    outputs = rows_with_a_zero(routes, like=hidden)  # [N + 1, H]
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
    """The gradients of hidden, routing weights, gate_up_proj and down_proj.

    The last two are empty unless ``projections``. The order of the steps keeps peak memory low: ``activated`` and
    ``drows`` are freed before dgate_up, the largest gradient, is allocated.

    Args:
        dresult: ``[T, H]``.
        hidden: ``[T, H]``.
        top_k_weights: ``[T, K]``.
        gate_up_proj: ``[E, 2I, H]``.
        down_proj: ``[E, H, I]``.
        pre: The pre-activations that :func:`forward` returned, interleaved ``[N, 2I]``.
    """

    def room(weight: Tensor) -> Tensor:
        return torch.empty_like(weight) if projections else weight.new_empty(0)

    if routing.row_of_route.numel() == 0:
        dweights = torch.zeros_like(top_k_weights)
        return torch.zeros_like(hidden), dweights, room(gate_up_proj).zero_(), room(down_proj).zero_()
    offsets, token_of_row = routing.offsets, routing.token_of_row
    weights = routing.of_rows(top_k_weights).float()  # [N]
    # dpre [N, 2I], activated [N, I] (already multiplied by the routing weights), dweights [N]
    dpre, activated, dweights = products.gated_backward(dresult, down_proj, pre, weights, offsets, token_of_row)
    ddown = room(down_proj)  # [E, H, I]
    if projections:
        products.gradient(dresult, activated, offsets, token_of_row, out=ddown, interleaved=False)
    del activated
    drows = rows_with_a_zero(len(dpre), like=hidden)  # [N + 1, H]: hidden's gradient, one row per route
    products.rows(dpre, gate_up_proj, offsets, drows[: len(dpre)], interleaved=True)
    dhidden = sum_of_rows(drows, routing)
    del drows
    dgate_up = room(gate_up_proj)  # [E, 2I, H], written through its transpose [E, H, 2I]
    if projections:
        products.gradient(hidden, dpre, offsets, token_of_row, out=dgate_up.mT, interleaved=True)
    return dhidden, routing.of_routes(dweights).to(top_k_weights.dtype), dgate_up, ddown
