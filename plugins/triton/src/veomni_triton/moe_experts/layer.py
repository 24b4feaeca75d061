"""One call's forward and backward, put together from the kernels.

``T`` tokens, ``K`` choices per token, ``N = T * K`` rows, ``E`` experts, ``H`` hidden, ``I`` intermediate.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from veomni_triton.moe_experts.activation import Activation, activation_backward
from veomni_triton.moe_experts.gate_up import gate_up_product
from veomni_triton.moe_experts.launch import Launch, Launches, launches
from veomni_triton.moe_experts.routing import Routing, route
from veomni_triton.moe_experts.row_product import row_product
from veomni_triton.moe_experts.rows import combine_rows, spread_rows
from veomni_triton.moe_experts.tiles import COPY_ENGINE_ALIGNMENT, can_be_described
from veomni_triton.moe_experts.weight_gradients import bias_gradient, weight_gradient

_ALIGNED_COLUMNS = 8  # 16-bit values in 16 bytes: a slice of columns must begin at such a multiple for TMA


class ExpertsLayer:
    """The operands that forward and backward share, whether TMA can address them, and the launches.

    Args:
        hidden: ``[T, H]``.
        top_k_index: ``[T, K]``.
        top_k_weights: ``[T, K]``.
        gate_up_proj: ``[E, 2I, H]``.
        down_proj: ``[E, H, I]``.
        gate_up_bias: ``[E, 2I]``, contiguous, or ``None``.
        down_bias: ``[E, H]``, contiguous, or ``None``.
        activation: The activation between the projections.
    """

    def __init__(
        self,
        hidden: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        gate_up_proj: Tensor,
        down_proj: Tensor,
        gate_up_bias: Tensor | None,
        down_bias: Tensor | None,
        activation: Activation,
    ) -> None:
        self.hidden = hidden if hidden.stride(-1) == 1 else hidden.contiguous()
        self.top_k_index, self.top_k_weights = top_k_index, top_k_weights.contiguous()
        self.gate_up_proj, self.down_proj = gate_up_proj, down_proj
        self.gate_up_bias, self.down_bias = gate_up_bias, down_bias
        self.activation = activation
        # The tensors that this class makes have rows of H, I or 2I values, which TMA can address if those are aligned.
        lines_are_aligned = all(
            width * hidden.element_size() % COPY_ENGINE_ALIGNMENT == 0 for width in down_proj.shape[1:]
        )
        # A descriptor of a tensor without elements is refused.
        self.described = (
            top_k_index.numel() > 0
            and lines_are_aligned
            and _matrices_can_be_described(gate_up_proj)
            and _matrices_can_be_described(down_proj)
        )
        # gate_up loads blocks of gate_up_proj that are contiguous along H; row_product can also take its transpose.
        self.gate_up_described = self.described and can_be_described(gate_up_proj)
        self.launches = self._launches(self.described)

    def _launches(self, described: bool) -> Launches:
        experts, rows, width = self.gate_up_proj.shape
        return launches(self.hidden.dtype, self.top_k_index.numel() // experts, rows * width, described)

    def forward(self) -> tuple[Tensor, Tensor, Routing]:
        """The result ``[T, H]``, the pre-activations ``[N, 2I]`` and the routing."""
        routing = route(self.top_k_index, self.gate_up_proj.shape[0], self.launches.block_m)
        pre, activated = self.gate_up(routing)
        # [N, H], not yet times the routing weights
        outputs = row_product(activated, self.down_proj.mT, routing, self.launches.down, self.described, self.down_bias)
        del activated  # before result is allocated; backward computes it again from pre
        result = torch.empty_like(self.hidden, memory_format=torch.contiguous_format)
        combine_rows(outputs, routing, result, self.top_k_weights)
        return result, pre, routing

    def gate_up(self, routing: Routing) -> tuple[Tensor, Tensor]:
        """The pre-activations ``[N, 2I]`` and the activations ``[N, I]``."""
        launch = self._launches(self.gate_up_described).gate_up
        return gate_up_product(
            self.hidden,
            self.gate_up_proj,
            self.gate_up_bias,
            routing,
            self.activation,
            launch,
            self.gate_up_described,
        )

    def routing(self, buffer: Tensor) -> Routing:
        """The routing that a forward left in ``buffer``; sizes that are not in the buffer follow from the operands."""
        tokens, k = self.top_k_index.shape
        return Routing(buffer, tokens, k, self.gate_up_proj.shape[0], self.launches.block_m)

    def backward(
        self,
        dresult: Tensor,
        pre: Tensor,
        routing: Routing,
        projections: bool,
        into: tuple[Tensor | None, Tensor | None] = (None, None),
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The gradients of hidden, routing weights, both projections and both biases.

        Args:
            dresult: ``[T, H]``.
            pre: ``[N, 2I]``, forward's pre-activations.
            routing: Forward's routing.
            projections: Whether the gradients of projections and biases are requested.
            into: ``[E, 2I, H]`` and ``[E, H, I]``, to which the projections' gradients are added where given.

        Returns:
            ``[T, H]``, ``[T, K]``, ``[E, 2I, H]``, ``[E, H, I]``, ``[E, 2I]`` and ``[E, H]``; empty tensors for what is
            not there, not requested, or added to ``into``.
        """
        # The order of the steps keeps few tensors of N rows alive at once, which decides the peak of memory.
        dgate_up, ddown, dgate_up_bias, ddown_bias = (dresult.new_empty(0) for _ in range(4))
        launches, described = self.launches, self.described
        drows = spread_rows(dresult, routing)  # [N, H], without the routing weights
        # [N, I]. The weights come in only in activation_backward, which needs the product without them too.
        dactivation = row_product(drows, self.down_proj, routing, launches.dactivation, described)
        dpre, weighted, dweights = activation_backward(
            dactivation, pre, self.top_k_index, self.top_k_weights, routing, self.activation, drows, self.down_bias
        )
        if projections:
            # `weighted` has the routing weights, so drows must not.
            ddown = self._weight_gradient(drows, weighted, routing, launches.ddown, into[1])
            if self.down_bias is not None:
                # A bias has no activation to carry the routing weights: they are passed.
                ddown_bias = bias_gradient(drows, routing, self.top_k_weights)
        del drows, dactivation, weighted
        if projections:
            dgate_up = self._weight_gradient(
                dpre, spread_rows(self.hidden, routing), routing, launches.dgate_up, into[0]
            )
            if self.gate_up_bias is not None:
                dgate_up_bias = bias_gradient(dpre, routing)
        return self._hidden_gradient(dpre, routing), dweights, dgate_up, ddown, dgate_up_bias, ddown_bias

    def _weight_gradient(
        self, left: Tensor, right: Tensor, routing: Routing, launch: Launch, into: Tensor | None
    ) -> Tensor:
        found = weight_gradient(left, right, routing, launch, self.described, into)
        return found if into is None else left.new_empty(0)

    def _hidden_gradient(self, dpre: Tensor, routing: Routing) -> Tensor:
        """``[T, H]``. With more than two routes per token, half its columns at a time.

        The rows ``[N, H]`` before they are summed by token would otherwise be the peak of backward's memory.
        """
        dhidden = torch.empty_like(self.hidden, memory_format=torch.contiguous_format)
        parts = 2 if routing.k > 2 else 1
        columns = triton.cdiv(dhidden.shape[1], parts * _ALIGNED_COLUMNS) * _ALIGNED_COLUMNS
        for matrices, part in zip(self.gate_up_proj.split(columns, dim=2), dhidden.split(columns, dim=1), strict=True):
            # The rows get no name, so that one part's are freed before the next part's are allocated.
            combine_rows(row_product(dpre, matrices, routing, self.launches.dhidden, self.described), routing, part)
        return dhidden


def _matrices_can_be_described(matrices: Tensor) -> bool:
    return can_be_described(matrices) or can_be_described(matrices.mT)
