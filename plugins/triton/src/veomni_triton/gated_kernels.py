"""Device code of swiglu_mlp: forward and backward of ``activation(gate) * up``, elementwise.

A program takes ``COLUMNS`` adjacent columns of one row. Rows are apart by a stride, because gate and up may be halves
of one packed projection.
"""

from __future__ import annotations

import triton
import triton.language as tl

from veomni_ops.triton_launches import triton_kernel

_TANH_SCALE = tl.constexpr(0.7978845608028654)  # sqrt(2 / pi)
_TANH_CUBE = tl.constexpr(0.044715)  # the coefficient of GELU's tanh approximation
_SQRT_HALF = tl.constexpr(0.7071067811865476)
_DENSITY_SCALE = tl.constexpr(0.3989422804014327)  # 1 / sqrt(2 * pi)

# R rows (all leading dimensions), I = width columns. Blocks are [COLUMNS], in float32 from load to store, so that each
# result is rounded once. Offsets of rows are int64, since R * I can exceed 2**31.


@triton_kernel
def forward_kernel(
    gate,  # [R, I], rows gate_stride apart
    up,  # [R, I], rows up_stride apart
    result,  # [R, I], contiguous, written
    gate_stride,
    up_stride,
    width,  # I
    ACTIVATION: tl.constexpr,  # "silu", "gelu", or "gelu_tanh", GELU's tanh approximation
    COLUMNS: tl.constexpr,
):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    kept = column < width
    g = tl.load(gate + row * gate_stride + column, mask=kept).to(tl.float32)
    u = tl.load(up + row * up_stride + column, mask=kept).to(tl.float32)
    value, _ = _activation(g, ACTIVATION)  # the unused derivative is dropped by the compiler
    tl.store(result + row * width + column, (value * u).to(result.dtype.element_ty), mask=kept)


@triton_kernel
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
    ACTIVATION: tl.constexpr,  # "silu", "gelu", or "gelu_tanh", GELU's tanh approximation
    COLUMNS: tl.constexpr,
):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    kept = column < width
    d = tl.load(dresult + row * dresult_stride + column, mask=kept).to(tl.float32)
    g = tl.load(gate + row * gate_stride + column, mask=kept).to(tl.float32)
    u = tl.load(up + row * up_stride + column, mask=kept).to(tl.float32)
    # Computed again from gate: saving it would cost another [R, I].
    value, slope = _activation(g, ACTIVATION)
    tl.store(dgate + row * width + column, (d * u * slope).to(dgate.dtype.element_ty), mask=kept)
    tl.store(dup + row * width + column, (d * value).to(dup.dtype.element_ty), mask=kept)


@triton.jit
def _activation(x, ACTIVATION: tl.constexpr):
    """The activation of float32 ``x``, and its derivative; both in x's shape."""
    # All three are x * share, with derivative share + x * dshare/dx.
    if ACTIVATION == "gelu":
        # share is the normal distribution's function, and its derivative that distribution's density.
        share = 0.5 * (1.0 + tl.erf(x * _SQRT_HALF))
        slope = share + x * _DENSITY_SCALE * tl.exp(-0.5 * x * x)
    else:
        # share = sigmoid(z), with derivative sigmoid(z) * (1 - sigmoid(z)) * dz/dx.
        if ACTIVATION == "gelu_tanh":
            # tanh(y) = 2 * sigmoid(2y) - 1, so GELU is x * sigmoid(2y), with y = scale * (x + cube * x**3).
            share = tl.sigmoid(2 * _TANH_SCALE * (x + _TANH_CUBE * x * x * x))
            # dz/dx of z = 2y.
            inner = 2 * _TANH_SCALE * (1 + 3 * _TANH_CUBE * x * x)
        else:
            share = tl.sigmoid(x)
            inner = 1.0
        slope = share * (1 + x * (1 - share) * inner)
    return x * share, slope
