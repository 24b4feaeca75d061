"""Device code of swiglu_mlp: forward and backward of ``activation(gate) * up``, elementwise.

A program takes ``COLUMNS`` adjacent columns of one row. Rows are apart by a stride, because gate and up may be halves
of one packed projection.
"""

from __future__ import annotations

import triton
import triton.language as tl

_TANH_SCALE = tl.constexpr(0.7978845608028654)  # sqrt(2 / pi)
_TANH_CUBE = tl.constexpr(0.044715)  # the coefficient of GELU's tanh approximation

# R rows (all leading dimensions), I = width columns. Blocks are [COLUMNS], in float32 from load to store, so that each
# result is rounded once. Offsets of rows are int64, since R * I can exceed 2**31.


@triton.jit
def forward_kernel(
    gate,  # [R, I], rows gate_stride apart
    up,  # [R, I], rows up_stride apart
    result,  # [R, I], contiguous, written
    gate_stride,
    up_stride,
    width,  # I
    TANH: tl.constexpr,  # GELU's tanh approximation instead of SiLU
    COLUMNS: tl.constexpr,
):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    kept = column < width
    g = tl.load(gate + row * gate_stride + column, mask=kept).to(tl.float32)
    u = tl.load(up + row * up_stride + column, mask=kept).to(tl.float32)
    value, _ = _activation(g, TANH)  # the unused derivative is dropped by the compiler
    tl.store(result + row * width + column, (value * u).to(result.dtype.element_ty), mask=kept)


@triton.jit
def backward_kernel(
    dresult,  # [R, I], rows dresult_stride apart
    gate,  # [R, I], rows gate_stride apart
    up,  # [R, I], rows up_stride apart
    dgate,  # [R, I], contiguous, written; not over gate, which another backward may need
    dup,  # [R, I], contiguous, written
    dresult_stride,
    gate_stride,
    up_stride,
    width,  # I
    TANH: tl.constexpr,  # GELU's tanh approximation instead of SiLU
    COLUMNS: tl.constexpr,
):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    kept = column < width
    d = tl.load(dresult + row * dresult_stride + column, mask=kept).to(tl.float32)
    g = tl.load(gate + row * gate_stride + column, mask=kept).to(tl.float32)
    u = tl.load(up + row * up_stride + column, mask=kept).to(tl.float32)
    # Computed again from gate: saving it would cost another [R, I].
    value, slope = _activation(g, TANH)
    tl.store(dgate + row * width + column, (d * u * slope).to(dgate.dtype.element_ty), mask=kept)
    tl.store(dup + row * width + column, (d * value).to(dup.dtype.element_ty), mask=kept)


@triton.jit
def _activation(x, TANH: tl.constexpr):
    """SiLU, or GELU's tanh approximation, of float32 ``x``, and its derivative; both in x's shape."""
    # Both are x * sigmoid(z), with derivative sigmoid(z) * (1 + x * (1 - sigmoid(z)) * dz/dx).
    if TANH:
        # tanh(y) = 2 * sigmoid(2y) - 1, so GELU is x * sigmoid(2y), with y = scale * (x + cube * x**3).
        share = tl.sigmoid(2 * _TANH_SCALE * (x + _TANH_CUBE * x * x * x))
        # dz/dx of z = 2y.
        inner = 2 * _TANH_SCALE * (1 + 3 * _TANH_CUBE * x * x)
    else:
        share = tl.sigmoid(x)
        inner = 1.0
    return x * share, share * (1 + x * (1 - share) * inner)
