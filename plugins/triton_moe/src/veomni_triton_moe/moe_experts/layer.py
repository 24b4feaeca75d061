"""One call's operands and its forward, put together from the kernels; ``backward`` has the other pass.

``T`` tokens, ``K`` choices per token, ``N = T * K`` rows, ``E`` experts, ``H`` hidden, ``I`` intermediate.
"""

from __future__ import annotations

import torch
from torch import Tensor

from veomni_core.kernels import ALIGNMENT
from veomni_ops.triton_descriptors import can_be_described
from veomni_triton_moe.moe_experts.activation import Activation
from veomni_triton_moe.moe_experts.adapters import Adapter
from veomni_triton_moe.moe_experts.gate_up import gate_up_product
from veomni_triton_moe.moe_experts.launch import Launches, launches
from veomni_triton_moe.moe_experts.routing import Routing, route
from veomni_triton_moe.moe_experts.row_product import row_product
from veomni_triton_moe.moe_experts.rows import combine_rows


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
        gate_up_adapter: An adapter of ``gate_up_proj``, or ``None``.
        down_adapter: An adapter of ``down_proj``, or ``None``.
        in_fixed_order: Whether all numbers of rows have one launch, so that no row's bits depend on how many there are.
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
        gate_up_adapter: Adapter | None = None,
        down_adapter: Adapter | None = None,
        in_fixed_order: bool = False,
    ) -> None:
        self.in_fixed_order = in_fixed_order
        self.hidden = hidden if hidden.stride(-1) == 1 else hidden.contiguous()
        self.top_k_index, self.top_k_weights = top_k_index, top_k_weights.contiguous()
        self.gate_up_proj, self.down_proj = gate_up_proj, down_proj
        self.gate_up_bias, self.down_bias = gate_up_bias, down_bias
        self.activation = activation
        self.gate_up_adapter, self.down_adapter = gate_up_adapter, down_adapter
        # The tensors that this class makes have rows of H, I or 2I values, which TMA can address if those are aligned.
        lines_are_aligned = all(width * hidden.element_size() % ALIGNMENT == 0 for width in down_proj.shape[1:])
        # A descriptor of a tensor without elements is refused.
        self.described = (
            top_k_index.numel() > 0
            and lines_are_aligned
            and _matrices_can_be_described(gate_up_proj)
            and _matrices_can_be_described(down_proj)
            and all(
                can_be_described(factor)
                for adapter in (gate_up_adapter, down_adapter)
                if adapter is not None
                for factor in (adapter.a, adapter.b)
            )
        )
        # gate_up loads blocks of gate_up_proj that are contiguous along H; row_product can also take its transpose.
        self.gate_up_described = self.described and can_be_described(gate_up_proj)
        self.launches = self._launches(self.described)

    def _launches(self, described: bool) -> Launches:
        experts, rows, width = self.gate_up_proj.shape
        rows_per_expert = 0 if self.in_fixed_order else self.top_k_index.numel() // experts
        return launches(self.hidden.dtype, rows_per_expert, rows * width, described)

    def forward(self) -> tuple[Tensor, Tensor, Routing, Tensor, Tensor]:
        """The result ``[T, H]``, and what backward needs.

        Returns:
            The result, the pre-activations ``[N, 2I]``, the routing, and both adapters' inner products ``[N, R]``,
            which are empty without an adapter.
        """
        routing = route(self.top_k_index, self.gate_up_proj.shape[0], self.launches.block_m)
        gate_up_inner, down_inner = self.hidden.new_empty(0), self.hidden.new_empty(0)
        if self.gate_up_adapter is not None:
            gate_up_inner = self.gate_up_adapter.inner(self.hidden, routing, tokens_of_rows=True)
        pre, activated = self.gate_up(routing, gate_up_inner)
        outer = None
        if self.down_adapter is not None:
            down_inner = self.down_adapter.inner(activated, routing)
            outer = self.down_adapter.outer(down_inner)
        # [N, H], not yet times the routing weights
        outputs = row_product(
            activated, self.down_proj.mT, routing, self.launches.down, self.described, self.down_bias, outer
        )
        del activated  # before result is allocated; backward computes it again from pre
        result = torch.empty_like(self.hidden, memory_format=torch.contiguous_format)
        combine_rows(outputs, routing, result, self.top_k_weights)
        return result, pre, routing, gate_up_inner, down_inner

    def gate_up(self, routing: Routing, inner: Tensor) -> tuple[Tensor, Tensor]:
        """The pre-activations ``[N, 2I]`` and the activations ``[N, I]``; ``inner`` is the adapter's, if any."""
        launch, adapter = self._launches(self.gate_up_described).gate_up, self.gate_up_adapter
        return gate_up_product(
            self.hidden,
            self.gate_up_proj,
            self.gate_up_bias,
            routing,
            self.activation,
            launch,
            self.gate_up_described,
            None if adapter is None else adapter.outer(inner),
        )

    def routing(self, buffer: Tensor) -> Routing:
        """The routing that a forward left in ``buffer``; sizes that are not in the buffer follow from the operands."""
        tokens, k = self.top_k_index.shape
        return Routing(buffer, tokens, k, self.gate_up_proj.shape[0], self.launches.block_m)


def _matrices_can_be_described(matrices: Tensor) -> bool:
    return can_be_described(matrices) or can_be_described(matrices.mT)
