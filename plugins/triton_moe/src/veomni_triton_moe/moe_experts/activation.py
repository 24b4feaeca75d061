"""The gated activation between an expert's projections, and its backward.

``up' * gate' * sigmoid(alpha * gate')`` with ``gate' = min(gate, limit)`` and ``up' = clamp(up, -limit, limit) +
up_offset``; SwiGLU is ``alpha = 1`` without limit and offset. The backward also gives the gradient of the routes'
weights: an expert's output is linear in its activation, so ``dresult · output = (dresult @ down) · activation``, for
which no output need be kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from veomni_triton_moe.moe_experts.routing import Routing


@dataclass(frozen=True)
class Activation:
    """The activation's constants; ``limit`` is ``None`` where nothing is clamped.

    ``interleaved`` says that gate and up are every other column, where otherwise they are halves.
    """

    alpha: float = 1.0
    limit: float | None = None
    up_offset: float = 0.0
    interleaved: bool = False

    def constants(self) -> dict[str, float | bool]:
        """The kernels' parameters."""
        return {
            "alpha": self.alpha,
            "limit": 0.0 if self.limit is None else self.limit,
            "up_offset": self.up_offset,
            "CLAMPED": self.limit is not None,
        }


@triton.jit
def bounded(gate, up, limit):
    """Gate at most ``limit``, up from ``-limit`` to ``limit``, and NaN where they are NaN.

    A GPU's plain minimum gives the other number for a NaN, so a broken step would look like a good one.
    """
    gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
    up = tl.clamp(up, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
    return gate, up


@triton.jit
def activate(gate, up, alpha, limit, up_offset, CLAMPED: tl.constexpr):
    """The activation of float32 values."""
    if CLAMPED:
        gate, up = bounded(gate, up, limit)
    return (up + up_offset) * (gate * tl.sigmoid(alpha * gate))


@triton.jit
def activation_gradients(d, gate, up, alpha, limit, up_offset, CLAMPED: tl.constexpr):
    """The gradients of gate and up for the activation's gradient ``d``; nothing passes where a value was clamped."""
    bounded_gate, bounded_up = gate, up
    if CLAMPED:
        bounded_gate, bounded_up = bounded(gate, up, limit)
    sigmoid = tl.sigmoid(alpha * bounded_gate)
    dgate = d * (bounded_up + up_offset) * sigmoid * (1.0 + alpha * bounded_gate * (1.0 - sigmoid))
    dup = d * bounded_gate * sigmoid
    if CLAMPED:
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
    drows: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """From the unweighted ``dactivation[N, I]``: the gradients of ``pre[N, 2I]`` and of the weights ``[T, K]``.

    Between them, the activation times its route's weight, written over ``dactivation``. With ``down_bias[E, H]``, the
    rows' upstream gradients ``drows[N, H]`` are needed for its share in the weights' gradient.
    """
    width = dactivation.shape[1]
    dpre = torch.empty_like(pre)
    dweights = torch.empty_like(top_k_weights, memory_format=torch.contiguous_format)
    half, unit = (1, 2) if activation.interleaved else (width, 1)
    _activation_backward[(routing.routes,)](
        dactivation,
        pre,
        dpre,
        top_k_index.contiguous(),
        top_k_weights.contiguous(),
        dweights,
        drows,
        down_bias,
        routing.route_of_row,
        routing.offsets,
        routing.experts,
        width,
        0 if down_bias is None else down_bias.shape[1],
        HALF=half,
        UNIT=unit,
        BLOCK=min(triton.next_power_of_2(width), 1024),
        num_warps=4,
        **activation.constants(),
    )
    return dpre, dactivation, dweights


@triton.jit(do_not_specialize=["experts"])
def _activation_backward(
    dactivation,
    pre,
    dpre,
    top_k_index,
    top_k_weights,
    dweights,
    drows,
    down_bias,
    route_of_row,
    offsets,
    experts,
    width,
    hidden_width,
    alpha,
    limit,
    up_offset,
    CLAMPED: tl.constexpr,
    HALF: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    route = tl.load(route_of_row + row)
    kept = row < tl.load(offsets + experts)
    weight = tl.load(top_k_weights + route).to(tl.float32)
    dweight = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mask = (column < width) & kept
        at = row * 2 * width + column * UNIT
        gate = tl.load(pre + at, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(pre + at + HALF, mask=mask, other=0.0).to(tl.float32)
        d = tl.load(dactivation + row * width + column, mask=mask, other=0.0).to(tl.float32)
        value = activate(gate, up, alpha, limit, up_offset, CLAMPED)
        dweight += d * value
        dgate, dup = activation_gradients(d * weight, gate, up, alpha, limit, up_offset, CLAMPED)
        tl.store(dactivation + row * width + column, (value * weight).to(dactivation.dtype.element_ty), mask=mask)
        tl.store(dpre + at, dgate.to(dpre.dtype.element_ty), mask=mask)
        tl.store(dpre + at + HALF, dup.to(dpre.dtype.element_ty), mask=mask)
    total = tl.sum(dweight)
    if down_bias is not None:
        expert = tl.load(top_k_index + route)
        for start in range(0, hidden_width, BLOCK):
            column = start + tl.arange(0, BLOCK)
            mask = (column < hidden_width) & kept
            bias = tl.load(down_bias + expert * hidden_width + column, mask=mask, other=0.0).to(tl.float32)
            d = tl.load(drows + row * hidden_width + column, mask=mask, other=0.0).to(tl.float32)
            total += tl.sum(d * bias)
    tl.store(dweights + route, tl.where(kept, total, 0.0).to(dweights.dtype.element_ty))
