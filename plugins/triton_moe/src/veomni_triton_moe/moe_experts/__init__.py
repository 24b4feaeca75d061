"""Mixture-of-experts MLPs: gather, gate and up projection, and activation in one kernel; no atomics.

Dimensions, here and in all modules of this package: ``T`` tokens, ``K`` experts chosen per token, ``N = T * K`` routes
(one choice of one token each) and as many rows, ``E`` experts, ``H`` hidden, ``I`` intermediate. Rows are the routes
sorted by expert; the rows of an expert are its group.

Forward sorts the routes (``routing``), multiplies each group's tokens by its gate and up projection (``gate_up``) and
the activations by its down projection (``row_product``), and sums each token's ``K`` rows (``rows``). ``layer`` puts
it together, and ``backward`` the other pass, also from ``weight_gradients`` and ``activation``; ``operators`` is what
``torch.compile`` sees, and ``autograd`` joins them. The products share ``tiles``; ``launch`` has their tile sizes;
``adapters`` go beside the weights.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from veomni_core.kernels import product_operands
from veomni_ops.lora_samples import Adapter
from veomni_triton_moe.moe_experts.activation import Activation
from veomni_triton_moe.moe_experts.autograd import Experts
from veomni_triton_moe.moe_experts.factors import by_expert

_NO_ADAPTER = (None, None, 1.0)


def standard(
    hidden: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    gate_up_lora: Adapter | None = None,
    down_lora: Adapter | None = None,
    in_fixed_order: bool = False,
) -> Tensor:
    """Sum over a token's experts of ``weight * down(silu(gate) * up)``, with gradients of all but the index.

    Sums are float32, rounded to hidden's dtype at the end. Under autocast, operands are cast to its dtype, and the
    result back to hidden's. Experts without tokens get gradients of zero. Nothing is
    computed for the gradient of a parameter that requires none.

    Args:
        hidden: ``[T, H]``.
        top_k_index: ``[T, K]``, integers; routes to an index outside ``[0, E)`` are dropped.
        top_k_weights: ``[T, K]``.
        gate_up_proj: ``[E, 2I, H]``, gate in the first half; either of the last two dimensions may be the contiguous
            one.
        down_proj: ``[E, H, I]``, likewise.
        gate_up_lora: ``(a[E, r, H], b[E, 2I, r], scaling)``, which is multiplied beside ``gate_up_proj``.
        down_lora: ``(a[E, r, I], b[E, H, r], scaling)``, likewise.
        in_fixed_order: Whether all numbers of tokens have the same tiles, so that no token's bits depend on the others.

    Returns:
        ``[T, H]`` in hidden's dtype.

    Raises:
        TypeError: hidden, the projections and the adapters differ in dtype, and autocast is off.
    """
    operands = (hidden, top_k_index, top_k_weights, gate_up_proj, down_proj, gate_up_lora, down_lora)
    return _experts(*operands, in_fixed_order=in_fixed_order)


def standard_recomputing(
    hidden: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    gate_up_lora: Adapter | None = None,
    down_lora: Adapter | None = None,
) -> Tensor:
    """:func:`standard`, recomputing the pre-activations in backward instead of saving ``2I`` values per route."""
    return _experts(
        hidden, top_k_index, top_k_weights, gate_up_proj, down_proj, gate_up_lora, down_lora, recompute=True
    )


def standard_accumulating(
    hidden: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    gate_up_lora: Adapter | None = None,
    down_lora: Adapter | None = None,
) -> Tensor:
    """:func:`standard`, adding the projections' gradients in place to those that ``.grad`` already holds.

    Autograd then gets no gradient for them, so hooks in C++ (``DistributedDataParallel``'s) don't run. A projection
    with Python hooks gets its gradient through autograd as usual, and so does everything under ``torch.compile``.
    """
    return _experts(
        hidden, top_k_index, top_k_weights, gate_up_proj, down_proj, gate_up_lora, down_lora, accumulate=True
    )


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
    gate_up_lora: Adapter | None = None,
    down_lora: Adapter | None = None,
    in_fixed_order: bool = False,
) -> Tensor:
    """gpt-oss's experts: ``(clamp(up) + up_offset) * g * sigmoid(alpha * g)``, ``g = min(gate, limit)``, and biases.

    Args:
        hidden: ``[T, H]``, as the next four are :func:`standard`'s.
        top_k_index: ``[T, K]``.
        top_k_weights: ``[T, K]``.
        gate_up_proj: ``[E, 2I, H]``.
        down_proj: ``[E, H, I]``.
        gate_up_bias: ``[E, 2I]``.
        down_bias: ``[E, H]``, added before the routing weight is multiplied.
        alpha: Factor in the sigmoid.
        limit: Bound of gate from above, and of up from both sides.
        interleaved: Whether gate and up are the even and odd rows of ``gate_up_proj``; otherwise they are its halves.
        up_offset: Added to the clamped up.
        gate_up_lora: An adapter, as in :func:`standard`.
        down_lora: An adapter, as in :func:`standard`.
        in_fixed_order: As in :func:`standard`.

    Returns:
        ``[T, H]`` in hidden's dtype. Gradients reach all tensors but the index.
    """
    operands = (hidden, top_k_index, top_k_weights, gate_up_proj, down_proj, gate_up_lora, down_lora)
    activation = Activation(alpha, limit, up_offset, interleaved)
    return _experts(*operands, gate_up_bias, down_bias, activation, in_fixed_order=in_fixed_order)


standard_in_fixed_order = partial(standard, in_fixed_order=True)
clamped_in_fixed_order = partial(clamped, in_fixed_order=True)


def _experts(
    hidden: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    gate_up_lora: Adapter | None,
    down_lora: Adapter | None,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: Activation = Activation(),  # noqa: B008, it is frozen
    recompute: bool = False,
    accumulate: bool = False,
    in_fixed_order: bool = False,
) -> Tensor:
    gate_up_a, gate_up_b, gate_up_scaling = gate_up_lora or _NO_ADAPTER
    down_a, down_b, down_scaling = down_lora or _NO_ADAPTER
    rows, gate_up_proj, down_proj, gate_up_bias, down_bias, *factors = product_operands(
        "fused_triton",
        hidden=hidden,
        gate_up_proj=gate_up_proj,
        down_proj=down_proj,
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
        gate_up_a=gate_up_a,
        down_a=down_a,
        gate_up_b=gate_up_b,
        down_b=down_b,
    )
    # The kernels take no strides of biases.
    gate_up_bias, down_bias = (None if bias is None else bias.contiguous() for bias in (gate_up_bias, down_bias))
    constants = (
        gate_up_scaling,
        down_scaling,
        activation.alpha,
        activation.limit,
        activation.up_offset,
        activation.interleaved,
        in_fixed_order,
    )
    result: Tensor = Experts.apply(
        constants,
        recompute,
        accumulate,
        rows,
        top_k_index,
        top_k_weights,
        gate_up_proj,
        down_proj,
        gate_up_bias,
        down_bias,
        *(None if a is None else a.contiguous() for a in factors[:2]),
        *(None if b is None else by_expert(b) for b in factors[2:]),
    )
    return result.to(hidden.dtype)
