"""The sigmoid and SiLU of a float32 block, each with its derivative, and the hyperbolic tangent."""

from __future__ import annotations

import triton
import triton.language as tl

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def sigmoid(x):
    """``1 / (1 + exp(-x))`` and its derivative, both in x's shape."""
    # By exp2, which is one instruction: tl.exp and tl.sigmoid spend five more on the denormal results of exp, and 1 is
    # added to those here. Kernels that need only memory bandwidth have few instructions to spare.
    share = 1.0 / (1.0 + tl.exp2(x * -_LOG2_E))
    return share, share * (1.0 - share)


@triton.jit
def silu(x):
    """``x * sigmoid(x)`` and its derivative, both in x's shape; the compiler drops the one that isn't used."""
    share, _ = sigmoid(x)
    return x * share, share * (1.0 + x * (1.0 - share))


@triton.jit
def tanh(x):
    """The hyperbolic tangent to float32's precision: below 0.1 the quotient of exponentials would cancel."""
    e = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - e) / (1.0 + e)
    square = x * x
    near = x * (1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 + square * (-17.0 / 315.0))))
    return tl.where(tl.abs(x) < 0.1, near, tl.where(x < 0.0, -far, far))
