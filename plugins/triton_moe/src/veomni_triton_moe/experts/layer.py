"""One call's forward and backward, put together from the products."""

from __future__ import annotations

from torch import Tensor

from veomni_triton_moe.experts.activation import Activation, activation_backward
from veomni_triton_moe.experts.gate_up import gate_up_product
from veomni_triton_moe.experts.launch import launches
from veomni_triton_moe.experts.routing import Routing, route
from veomni_triton_moe.experts.row_product import row_product
from veomni_triton_moe.experts.rows import combine_rows, spread_rows
from veomni_triton_moe.experts.tiles import COPY_ENGINE_ALIGNMENT, can_be_described
from veomni_triton_moe.experts.weight_gradients import bias_gradient, weight_gradient


class ExpertsLayer:
    """The operands that forward and backward share, how they are addressed, and the tiles they are cut into.

    ``hidden[T, H]``, ``top_k_index[T, K]``, ``top_k_weights[T, K]``, ``gate_up_proj[E, 2I, H]``, ``down_proj[E, H, I]``
    and their biases, ``[E, 2I]`` and ``[E, H]``.
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
        lines_are_aligned = all(
            width * hidden.element_size() % COPY_ENGINE_ALIGNMENT == 0 for width in down_proj.shape[1:]
        )
        self.described = (
            top_k_index.numel() > 0
            and lines_are_aligned
            and _matrices_can_be_described(gate_up_proj)
            and _matrices_can_be_described(down_proj)
        )
        # The up-projection reads gate and up side by side along H, which only this layout holds together.
        self.gate_up_described = self.described and can_be_described(gate_up_proj)
        self.launches = launches(hidden.dtype, self.described)

    def forward(self) -> tuple[Tensor, Tensor, Routing]:
        """The result ``[T, H]``, the pre-activations ``[N, 2I]`` and the routing."""
        routing = route(self.top_k_index, self.gate_up_proj.shape[0], self.launches.rows.block_m)
        pre, activated = self.gate_up(routing)
        outputs = row_product(activated, self.down_proj.mT, routing, self.launches.rows, self.described, self.down_bias)
        del activated
        return combine_rows(outputs, routing, self.top_k_weights), pre, routing

    def gate_up(self, routing: Routing) -> tuple[Tensor, Tensor]:
        """The pre-activations ``[N, 2I]`` and the activations ``[N, I]``."""
        launch = launches(self.hidden.dtype, self.gate_up_described).gate_up
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
        """The routing that a forward left in ``buffer``."""
        return Routing(buffer, *self.top_k_index.shape, self.gate_up_proj.shape[0], self.launches.rows.block_m)

    def backward(
        self, dresult: Tensor, pre: Tensor, routing: Routing, projections: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The gradients of hidden, weights, projections and biases; empty ones for what is not there or not asked.

        Ordered so that at most three tensors of ``N`` rows live beside the pre-activations: at the Qwen3-30B-A3B shape
        the peak is the gradients, twice the pre-activations and one tensor ``[N, H]``.
        """
        dgate_up, ddown, dgate_up_bias, ddown_bias = (dresult.new_empty(0) for _ in range(4))
        drows = spread_rows(dresult, routing)
        dactivation = row_product(drows, self.down_proj, routing, self.launches.rows, self.described)
        dpre, weighted, dweights = activation_backward(
            dactivation, pre, self.top_k_index, self.top_k_weights, routing, self.activation, drows, self.down_bias
        )
        if projections:
            ddown = weight_gradient(drows, weighted, routing, self.launches.weights, self.described)
            if self.down_bias is not None:
                ddown_bias = bias_gradient(drows, routing, self.top_k_weights)
        del drows, dactivation, weighted
        dhidden = combine_rows(
            row_product(dpre, self.gate_up_proj, routing, self.launches.rows, self.described), routing
        )
        if projections:
            rows = spread_rows(self.hidden, routing)
            dgate_up = weight_gradient(dpre, rows, routing, self.launches.weights, self.described)
            if self.gate_up_bias is not None:
                dgate_up_bias = bias_gradient(dpre, routing)
        return dhidden, dweights, dgate_up, ddown, dgate_up_bias, ddown_bias


def _matrices_can_be_described(matrices: Tensor) -> bool:
    return can_be_described(matrices) or can_be_described(matrices.mT)
