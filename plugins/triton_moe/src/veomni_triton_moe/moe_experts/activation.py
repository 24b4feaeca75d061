"""The gated activation between an expert's projections, and its backward.

``up' * gate' * sigmoid(alpha * gate')`` with ``gate' = min(gate, limit)`` and ``up' = clamp(up, -limit, limit) +
up_offset``; SwiGLU is ``alpha = 1`` without limit and offset. The backward also gives the gradient of the routing
weights, ``dresult · output`` per route. An expert's output is linear in its activation, so this equals
``(dresult @ down) · activation``: backward has both, and forward need not save the outputs ``[N, H]``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from veomni_ops.sizes import power_of_two
from veomni_ops.triton_launches import triton_kernel
from veomni_triton_moe.moe_experts.routing import Routing


@dataclass(frozen=True)
class Activation:
    """The activation's constants.

    Attributes:
        alpha: Factor of gate in the sigmoid.
        limit: Bound of gate (above) and up (both sides); ``None`` for no clamp.
        up_offset: Added to up after the clamp.
        interleaved: Whether gate and up are the even and odd columns of ``pre``; otherwise they are its halves.
    """

    alpha: float = 1.0
    limit: float | None = None
    up_offset: float = 0.0
    interleaved: bool = False

    def parameters(self) -> tuple[float, float, float]:
        """The kernels' ``alpha``, ``limit`` and ``up_offset``; without ``CLAMPED`` they don't read ``limit``."""
        return self.alpha, 0.0 if self.limit is None else self.limit, self.up_offset


# T tokens, K choices per token, N = T * K routes and as many rows, E experts, H hidden, I intermediate. The first three
# functions are elementwise, in float32, on blocks of any one shape; alpha, limit and up_offset are scalars.


@triton.jit
def bounded(gate, up, limit):
    """Gate at most ``limit``, up from ``-limit`` to ``limit``; a NaN stays NaN."""
    # By default a GPU's minimum of a NaN and a number is the number: a diverged step would look like a good one.
    gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
    up = tl.clamp(up, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
    return gate, up


@triton.jit
def activate(gate, up, alpha, limit, up_offset, CLAMPED: tl.constexpr):
    """The activation of float32 ``gate`` and ``up``."""
    if CLAMPED:
        gate, up = bounded(gate, up, limit)
    return (up + up_offset) * (gate * tl.sigmoid(alpha * gate))


@triton.jit
def activation_gradients(d, gate, up, alpha, limit, up_offset, CLAMPED: tl.constexpr):
    """The gradients of gate and up for the activation's gradient ``d``; zero where a value was clamped."""
    bounded_gate, bounded_up = gate, up
    if CLAMPED:
        bounded_gate, bounded_up = bounded(gate, up, limit)
    sigmoid = tl.sigmoid(alpha * bounded_gate)
    # The derivative of g * s by g, with s = sigmoid(alpha * g), is s * (1 + alpha * g * (1 - s)).
    dgate = d * (bounded_up + up_offset) * sigmoid * (1.0 + alpha * bounded_gate * (1.0 - sigmoid))
    dup = d * bounded_gate * sigmoid
    if CLAMPED:
        # By the values before the clamp; at the limit itself the gradient passes, as in torch.clamp.
        dgate = tl.where(gate <= limit, dgate, 0.0)
        dup = tl.where((up >= -limit) & (up <= limit), dup, 0.0)
    return dgate, dup


def activation_backward(
    dactivation: Tensor,
    pre: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    routing: Routing,
    activation: Activation,
    dresult: Tensor | None = None,
    down_bias: Tensor | None = None,
    weighted: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of the pre-activations and of the routing weights, and the weighted activations.

    Args:
        dactivation: ``[N, I]``, ``dresult[token] @ down``, without the routing weights. Overwritten if ``weighted``.
        pre: ``[N, 2I]``, contiguous.
        top_k_index: ``[T, K]``.
        top_k_weights: ``[T, K]``.
        routing: Which route each row is.
        activation: The activation, and how ``pre`` is laid out.
        dresult: ``[T, H]``, contiguous; read only with ``down_bias``.
        down_bias: ``[E, H]``, contiguous, or ``None``. A part of the output, hence of the routing weights' gradient.
        weighted: Whether the weighted activations are computed.

    Returns:
        ``dpre[N, 2I]``; the activations times their routing weights ``[N, I]``, in dactivation's memory, which are the
        operand of the down projection's gradient; ``dweights[T, K]``. Rows of dropped routes are not written, but
        their ``dweights`` are zeros.
    """
    width = dactivation.shape[1]
    dpre = torch.empty_like(pre)
    dweights = torch.empty_like(top_k_weights, memory_format=torch.contiguous_format)
    # In pre, up stands `half` after its gate, and the next gate `unit` after this one.
    half, unit = (1, 2) if activation.interleaved else (width, 1)
    _activation_backward[(routing.routes,)](
        dactivation,
        pre,
        dpre,
        top_k_index.contiguous(),
        top_k_weights.contiguous(),
        dweights,
        dresult,
        down_bias,
        routing.route_of_row,
        routing.offsets,
        routing.experts,
        routing.k,
        width,
        0 if down_bias is None else down_bias.shape[1],
        *activation.parameters(),
        CLAMPED=activation.limit is not None,
        HALF=half,
        UNIT=unit,
        WEIGHTED=weighted,
        BLOCK=min(power_of_two(width), 1024),
        num_warps=4,
    )
    return dpre, dactivation, dweights


# One program per row, because a routing weight's gradient is a sum over a whole row: no atomics, one order.
@triton_kernel(do_not_specialize=["experts", "k_per_token"])
def _activation_backward(
    dactivation,  # [N, I], read, then if WEIGHTED overwritten with the weighted activations
    pre,  # [N, 2I]
    dpre,  # [N, 2I], written
    top_k_index,  # [T, K]
    top_k_weights,  # [T, K]
    dweights,  # [T, K], written
    dresult,  # [T, H] or None
    down_bias,  # [E, H] or None
    route_of_row,  # [N]
    offsets,  # [E + 1]
    experts,  # E
    k_per_token,  # K
    width,  # I
    hidden_width,  # H, 0 without down_bias
    alpha,
    limit,
    up_offset,
    CLAMPED: tl.constexpr,
    HALF: tl.constexpr,
    UNIT: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # int64, since N * 2I can exceed 2**31.
    row = tl.program_id(0).to(tl.int64)
    route = tl.load(route_of_row + row)
    # offsets[E] is the number of rows in groups. The rows after it, of dropped routes, hold uninitialised memory.
    kept = row < tl.load(offsets + experts)
    weight = tl.load(top_k_weights + route).to(tl.float32)
    # Added elementwise over the blocks of a row, and across the block once at the end.
    dweight = tl.zeros((BLOCK,), tl.float32)  # [BLOCK]
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)  # [BLOCK], as all values in this loop
        mask = (column < width) & kept
        at = row * 2 * width + column * UNIT
        gate = tl.load(pre + at, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(pre + at + HALF, mask=mask, other=0.0).to(tl.float32)
        d = tl.load(dactivation + row * width + column, mask=mask, other=0.0).to(tl.float32)
        value = activate(gate, up, alpha, limit, up_offset, CLAMPED)
        dweight += d * value
        # d comes without the routing weight, because dweight needs it so; gate and up need it times the weight.
        dgate, dup = activation_gradients(d * weight, gate, up, alpha, limit, up_offset, CLAMPED)
        if WEIGHTED:
            # In place, which saves a tensor [N, I]: nothing reads these elements of d again.
            tl.store(dactivation + row * width + column, (value * weight).to(dactivation.dtype.element_ty), mask=mask)
        tl.store(dpre + at, dgate.to(dpre.dtype.element_ty), mask=mask)
        tl.store(dpre + at + HALF, dup.to(dpre.dtype.element_ty), mask=mask)
    total = tl.sum(dweight)
    if down_bias is not None:
        # The output is weight * (down @ activation + bias): the bias's share of the dot product with the gradient.
        expert = tl.load(top_k_index + route)
        token = (route // k_per_token).to(tl.int64)
        for start in range(0, hidden_width, BLOCK):
            column = start + tl.arange(0, BLOCK)  # [BLOCK]
            # A dropped route's expert is no index of down_bias; `kept` keeps it from being read.
            mask = (column < hidden_width) & kept
            bias = tl.load(down_bias + expert * hidden_width + column, mask=mask, other=0.0).to(tl.float32)
            d = tl.load(dresult + token * hidden_width + column, mask=mask, other=0.0).to(tl.float32)
            total += tl.sum(d * bias)
    # Every route has one row, so that all of dweights is written, with zeros for the dropped.
    tl.store(dweights + route, tl.where(kept, total, 0.0).to(dweights.dtype.element_ty))
