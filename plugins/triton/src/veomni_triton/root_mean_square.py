"""What the kernels compute on a block of ``x`` in float32, whether it holds whole rows or a piece of one."""

from __future__ import annotations

import triton
import triton.language as tl

# T rows, H = WIDTH columns. Blocks of x are [ROWS, BLOCK] where rows are whole, [PIECE] where one row comes in pieces.


@triton.jit
def reciprocal_rms(sum_of_squares, eps, WIDTH: tl.constexpr):
    """``1 / rms`` of each row, in the shape of ``sum_of_squares``: ``[ROWS]``, or a scalar."""
    # WIDTH and not the padded size of the block: the padding is zeros, which add nothing to the sum.
    return tl.rsqrt(sum_of_squares / WIDTH + eps)


@triton.jit
def gain(weight, column, OFFSET: tl.constexpr, WIDTH: tl.constexpr):
    """``OFFSET + weight[column]`` in float32, in the shape of ``column``; ones if ``weight`` is ``None``."""
    # Cast before OFFSET is added: 1 + weight in bfloat16 would lose most of a small weight.
    if weight is None:
        return tl.full(column.shape, 1.0, tl.float32)
    else:
        return tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32) + OFFSET


@triton.jit
def normalised(x, reciprocal, ROUND_SCALE: tl.constexpr, ROUND_NORMALISED: tl.constexpr):
    """``x * reciprocal`` in float32, in x's shape; ``reciprocal`` broadcasts against it.

    The casts to x's dtype and back round to it: the variants differ in whether ``reciprocal`` or the product is
    rounded, and a quarter of all bf16 results moves with the place of the rounding.
    """
    scale = reciprocal.to(x.dtype).to(tl.float32) if ROUND_SCALE else reciprocal
    result = x.to(tl.float32) * scale
    return result.to(x.dtype).to(tl.float32) if ROUND_NORMALISED else result
