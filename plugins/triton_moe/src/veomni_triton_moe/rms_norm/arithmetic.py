"""What the kernels compute on a tile of rows in float32, whether the tile holds the rows whole or in part."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def reciprocal_rms(sum_of_squares, eps, WIDTH: tl.constexpr):
    """``1 / rms`` of rows of WIDTH elements."""
    return tl.rsqrt(sum_of_squares / WIDTH + eps)


@triton.jit
def gain(weight, column, OFFSET: tl.constexpr, WIDTH: tl.constexpr):
    """``OFFSET + weight`` at ``column``, in float32; 1 where there is no weight."""
    if weight is None:
        return tl.full(column.shape, 1.0, tl.float32)
    else:
        return tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32) + OFFSET


@triton.jit
def normalised(x, reciprocal, ROUND_SCALE: tl.constexpr, ROUND_NORMALISED: tl.constexpr):
    """``x * reciprocal`` in float32, rounded to x's dtype on the way where the variant does."""
    scale = reciprocal.to(x.dtype).to(tl.float32) if ROUND_SCALE else reciprocal
    result = x.to(tl.float32) * scale
    return result.to(x.dtype).to(tl.float32) if ROUND_NORMALISED else result
