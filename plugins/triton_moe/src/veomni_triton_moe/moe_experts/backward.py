"""The backward of one call, put together from the kernels: through the down projection, then through gate and up.

``T`` tokens, ``K`` choices per token, ``N = T * K`` rows, ``E`` experts, ``H`` hidden, ``I`` intermediate, ``r`` an
adapter's rank, ``R`` the rank padded to whole blocks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from veomni_ops.sizes import ceil_div
from veomni_triton_moe.moe_experts.activation import activation_backward
from veomni_triton_moe.moe_experts.layer import ExpertsLayer
from veomni_triton_moe.moe_experts.narrow_products import factor_gradient
from veomni_triton_moe.moe_experts.routing import Routing
from veomni_triton_moe.moe_experts.row_product import row_product
from veomni_triton_moe.moe_experts.rows import combine_rows, spread_rows
from veomni_triton_moe.moe_experts.weight_gradients import bias_gradient, weight_gradient

_ALIGNED_COLUMNS = 8  # 16-bit values in 16 bytes: a slice of columns must begin at such a multiple for TMA


class Wanted(NamedTuple):
    """Which gradients of one projection are computed. What is frozen costs no work and no memory."""

    weight: bool
    bias: bool
    a: bool
    b: bool


class Gradients(NamedTuple):
    """Those of one projection ``[E, B, A]``; empty tensors for what is not wanted, or was added in place."""

    weight: Tensor  # [E, B, A]
    bias: Tensor  # [E, B]
    a: Tensor  # [E, r, A]
    b: Tensor  # [E, B, R]


def backward(
    layer: ExpertsLayer,
    dresult: Tensor,
    pre: Tensor,
    routing: Routing,
    inners: tuple[Tensor, Tensor],
    wanted: tuple[Wanted, Wanted],
    into: tuple[Tensor | None, Tensor | None] = (None, None),
) -> tuple[Tensor, Tensor, Gradients, Gradients]:
    """The gradients of hidden, of the routing weights, and of what belongs to either projection.

    Args:
        layer: The operands.
        dresult: ``[T, H]``.
        pre: ``[N, 2I]``, forward's pre-activations.
        routing: Forward's routing.
        inners: Forward's inner products ``[N, R]`` of the adapters of gate_up_proj and down_proj.
        wanted: Which gradients of gate_up_proj and of down_proj are computed.
        into: ``[E, 2I, H]`` and ``[E, H, I]``, to which the projections' gradients are added where given.

    Returns:
        ``[T, H]``, ``[T, K]``, and the gradients of gate_up_proj and of down_proj.
    """
    # The order of the steps keeps few tensors of N rows alive at once, which decides the peak of memory.
    dpre, dweights, of_down = _through_down(layer, dresult, pre, routing, inners[1], wanted[1], into[1])
    dhidden, of_gate_up = _through_gate_up(layer, dpre, routing, inners[0], wanted[0], into[0])
    return dhidden, dweights, of_gate_up, of_down


def _through_down(
    layer: ExpertsLayer,
    dresult: Tensor,
    pre: Tensor,
    routing: Routing,
    inner: Tensor,
    wanted: Wanted,
    into: Tensor | None,
) -> tuple[Tensor, Tensor, Gradients]:
    """The gradients of the pre-activations ``[N, 2I]``, of the routing weights ``[T, K]``, and of down_proj."""
    launches, described, adapter = layer.launches, layer.described, layer.down_adapter
    weight = bias = a = b = None
    # The gradients of the weight and the bias read rows [N, H]. All else gathers them from the tokens, so that frozen
    # experts write no copy of them. Neither has the routing weights.
    gathered = not (wanted.weight or wanted.bias)
    drows = dresult if gathered else spread_rows(dresult, routing)
    dinner = outer = None
    if adapter is not None:
        dinner = adapter.inner_gradient(drows, routing, gathered)  # [N, R], likewise
        outer = adapter.outer_gradient(dinner)
    # [N, I]. The weights come in only in activation_backward, which needs the product without them too.
    dactivation = row_product(
        drows, layer.down_proj, routing, launches.dactivation, described, outer=outer, tokens_of_rows=gathered
    )
    dpre, weighted, dweights = activation_backward(
        dactivation,
        pre,
        layer.top_k_index,
        layer.top_k_weights,
        routing,
        layer.activation,
        dresult,
        layer.down_bias,
        weighted=wanted.weight or wanted.a,
    )
    # `weighted` has the routing weights, so drows must not. Where it takes no part, the weights are passed.
    if wanted.weight:
        weight = weight_gradient(drows, weighted, routing, launches.ddown, described, into)
    if wanted.bias:
        bias = bias_gradient(drows, routing, layer.top_k_weights)
    if wanted.a and adapter is not None and dinner is not None:
        a = factor_gradient(weighted, dinner, adapter.rank, routing, transposed=True)
    if wanted.b and adapter is not None:
        b = factor_gradient(drows, inner, inner.shape[1], routing, weights=layer.top_k_weights, tokens_of_rows=gathered)
    return dpre, dweights, _gradients(None if into is not None else weight, bias, a, b, like=dpre)


def _through_gate_up(
    layer: ExpertsLayer, dpre: Tensor, routing: Routing, inner: Tensor, wanted: Wanted, into: Tensor | None
) -> tuple[Tensor, Gradients]:
    """The gradients of hidden ``[T, H]`` and of gate_up_proj, from those of the pre-activations ``[N, 2I]``."""
    adapter = layer.gate_up_adapter
    weight = bias = a = b = None
    if wanted.weight:
        rows = spread_rows(layer.hidden, routing)  # [N, H]
        weight = weight_gradient(dpre, rows, routing, layer.launches.dgate_up, layer.described, into)
        del rows
    if wanted.bias:
        bias = bias_gradient(dpre, routing)
    dinner = None if adapter is None else adapter.inner_gradient(dpre, routing)  # [N, R]
    if wanted.a and adapter is not None and dinner is not None:
        a = factor_gradient(layer.hidden, dinner, adapter.rank, routing, tokens_of_rows=True, transposed=True)
    if wanted.b and adapter is not None:
        b = factor_gradient(dpre, inner, inner.shape[1], routing)
    gradients = _gradients(None if into is not None else weight, bias, a, b, like=dpre)
    return _hidden_gradient(layer, dpre, dinner, routing), gradients


def _gradients(*found: Tensor | None, like: Tensor) -> Gradients:
    """Those found. The others are a tensor each, since an operator may return neither none, nor one of them twice."""
    return Gradients(*(like.new_empty(0) if each is None else each for each in found))


def _hidden_gradient(layer: ExpertsLayer, dpre: Tensor, dinner: Tensor | None, routing: Routing) -> Tensor:
    """``[T, H]``. With more than two routes per token, half its columns at a time.

    The rows ``[N, H]`` before they are summed by token would otherwise be the peak of backward's memory.
    """
    dhidden = torch.empty_like(layer.hidden, memory_format=torch.contiguous_format)
    width, parts = dhidden.shape[1], 2 if routing.k > 2 else 1
    size = ceil_div(width, parts * _ALIGNED_COLUMNS) * _ALIGNED_COLUMNS
    adapter, launch = layer.gate_up_adapter, layer.launches.dhidden
    for first in range(0, width, size):
        part = slice(first, first + size)
        outer = None if adapter is None or dinner is None else adapter.outer_gradient(dinner, part)
        matrices = layer.gate_up_proj.narrow(2, first, min(size, width - first))  # half as long as by a slice
        # The rows get no name, so that one part's are freed before the next part's are allocated.
        combine_rows(
            row_product(dpre, matrices, routing, launch, layer.described, outer=outer), routing, dhidden[:, part]
        )
    return dhidden
