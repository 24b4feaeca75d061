"""What the kernels compute on a block in float32, whether it holds whole groups or a piece of one.

The opening is what the gate multiplies with, and the source is what is normalised.
"""

from __future__ import annotations

import triton
import triton.language as tl

from veomni_triton.activations import sigmoid, silu


@triton.jit
def opened(gate, SIGMOID: tl.constexpr):
    """The opening and its derivative, in gate's shape."""
    wide = gate.to(tl.float32)
    if SIGMOID:
        return sigmoid(wide)
    else:
        return silu(wide)


@triton.jit
def source_of(x, opening, GATE_FIRST: tl.constexpr):
    """What is normalised, in x's shape."""
    wide = x.to(tl.float32)
    return wide * opening if GATE_FIRST else wide


@triton.jit
def result_of(
    source,
    scale,
    factor,
    opening,
    x_dtype: tl.constexpr,
    weight_dtype: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    ROUNDED: tl.constexpr,
):
    """The result before its last rounding; ``scale`` is 1 / rms and ``factor`` the weight, which broadcast.

    The casts to x's dtype and back round to it. A quarter of all bf16 results moves with the place of a rounding.
    """
    normal = source * scale
    if ROUNDED:
        normal = normal.to(x_dtype).to(tl.float32)
    weighted = normal * factor
    if GATE_FIRST:
        return weighted
    else:
        # Of two dtypes that differ, PyTorch's product is in float32.
        if ROUNDED and x_dtype == weight_dtype:
            weighted = weighted.to(x_dtype).to(tl.float32)
        return weighted * opening


@triton.jit
def weighted_gradient(dy, opening, GATE_FIRST: tl.constexpr):
    """The gradient of ``weight * normal``."""
    return dy if GATE_FIRST else dy * opening


@triton.jit
def input_gradients(dy, x, normal, scale, factor, opening, slope, projection, GATE_FIRST: tl.constexpr):
    """The gradients of ``x`` and of the gate.

    ``projection`` is the group's mean of ``normal`` times its gradient. Nothing is rounded, even where forward rounds:
    the derivative of a cast is the identity.
    """
    # With n = source / rms and g = the gradient of n: dsource = (g - n * mean(g * n)) / rms.
    dnormal = weighted_gradient(dy, opening, GATE_FIRST) * factor
    dsource = (dnormal - normal * projection) * scale
    if GATE_FIRST:
        return dsource * opening, dsource * x * slope
    else:
        return dsource, dy * factor * normal * slope
