"""Mixture-of-experts MLPs: the gather fused into the up-projection, the activation into its epilogue, no atomics.

``operators`` is what autograd sees; ``layer`` puts a call together from ``routing`` (which row is whose), ``rows``
(between the order of tokens and that of experts), the products ``gate_up``, ``row_product`` and ``weight_gradients``,
and ``activation``'s backward. ``tiles`` is what the products share, ``launch`` their sizes.
"""

from __future__ import annotations

from torch import Tensor

from veomni_core.ops.autocast import product_operands
from veomni_triton_moe.moe_experts.activation import Activation
from veomni_triton_moe.moe_experts.operators import forward


def standard(
    hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor, gate_up_proj: Tensor, down_proj: Tensor
) -> Tensor:
    """Sum over a token's experts of ``weight * down(silu(gate) * up)``.

    ``hidden[T, H]``, ``top_k_index[T, K]`` (outside ``[0, E)`` is dropped), ``top_k_weights[T, K]``, ``gate_up_proj[E,
    2I, H]`` with gate first, ``down_proj[E, H, I]``; gives ``[T, H]``. Gradients reach all but the index; experts
    without tokens get zeros. Sums are float32, rounded to hidden's dtype at the end. Either of the weights' last two
    dimensions may be the contiguous one. Under autocast all of this is in its dtype, but the result's.

    Raises:
        TypeError: hidden and the projections differ in dtype, and autocast is off.
    """
    return _experts(hidden, top_k_index, top_k_weights, gate_up_proj, down_proj)


def standard_recomputing(
    hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor, gate_up_proj: Tensor, down_proj: Tensor
) -> Tensor:
    """:func:`standard`, computing the pre-activations anew in backward instead of saving ``2I`` values per route."""
    return _experts(hidden, top_k_index, top_k_weights, gate_up_proj, down_proj, recompute=True)


def standard_accumulating(
    hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor, gate_up_proj: Tensor, down_proj: Tensor
) -> Tensor:
    """:func:`standard`, adding the projections' gradients in place to those that ``.grad`` holds already.

    Autograd then sees no gradient of them, so what waits for one in C++ (``DistributedDataParallel``) is not told;
    hooks that Python can see are, and so is everything under ``torch.compile``: their gradients go by autograd.
    """
    return _experts(hidden, top_k_index, top_k_weights, gate_up_proj, down_proj, accumulate=True)


def clamped(
    hidden: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    alpha: float = 1.702,
    limit: float = 7.0,
    interleaved: bool = False,
    up_offset: float = 1.0,
) -> Tensor:
    """gpt-oss's experts: ``(clamp(up) + up_offset) * g * sigmoid(alpha * g)``, ``g = min(gate, limit)``, and biases.

    Shapes as :func:`standard`, ``gate_up_bias[E, 2I]`` and ``down_bias[E, H]``; gate and up are halves of the columns,
    or every other one where ``interleaved``. Gradients reach all tensors but the index.
    """
    activation = Activation(alpha, limit, up_offset, interleaved)
    return _experts(hidden, top_k_index, top_k_weights, gate_up_proj, down_proj, gate_up_bias, down_bias, activation)


def _experts(
    hidden: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: Activation = Activation(),  # noqa: B008, it is frozen
    recompute: bool = False,
    accumulate: bool = False,
) -> Tensor:
    rows, gate_up_proj, down_proj, gate_up_bias, down_bias = product_operands(
        "fused_triton",
        hidden=hidden,
        gate_up_proj=gate_up_proj,
        down_proj=down_proj,
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
    )
    # The kernels read a bias by its expert's row alone, so its columns must lie side by side.
    gate_up_bias, down_bias = (None if bias is None else bias.contiguous() for bias in (gate_up_bias, down_bias))
    result: Tensor = forward(
        rows,
        top_k_index,
        top_k_weights,
        gate_up_proj,
        down_proj,
        gate_up_bias,
        down_bias,
        activation.alpha,
        activation.limit,
        activation.up_offset,
        activation.interleaved,
        recompute,
        accumulate,
    )[0]
    return result.to(hidden.dtype)
