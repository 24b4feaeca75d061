"""The two launches of a gated MLP's activation; a program takes a stretch of columns of one row."""

from __future__ import annotations

import triton
import triton.language as tl

_TANH_SCALE = tl.constexpr(0.7978845608028654)  # sqrt(2 / pi)
_TANH_CUBE = tl.constexpr(0.044715)


@triton.jit
def forward_kernel(gate, up, result, gate_stride, up_stride, width, TANH: tl.constexpr, COLUMNS: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    kept = column < width
    g = tl.load(gate + row * gate_stride + column, mask=kept).to(tl.float32)
    u = tl.load(up + row * up_stride + column, mask=kept).to(tl.float32)
    value, _ = _activation(g, TANH)
    tl.store(result + row * width + column, (value * u).to(result.dtype.element_ty), mask=kept)


@triton.jit
def backward_kernel(
    dresult,
    gate,
    up,
    dgate,
    dup,
    dresult_stride,
    gate_stride,
    up_stride,
    width,
    TANH: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    kept = column < width
    d = tl.load(dresult + row * dresult_stride + column, mask=kept).to(tl.float32)
    g = tl.load(gate + row * gate_stride + column, mask=kept).to(tl.float32)
    u = tl.load(up + row * up_stride + column, mask=kept).to(tl.float32)
    value, slope = _activation(g, TANH)
    tl.store(dgate + row * width + column, (d * u * slope).to(dgate.dtype.element_ty), mask=kept)
    tl.store(dup + row * width + column, (d * value).to(dup.dtype.element_ty), mask=kept)


@triton.jit
def _activation(x, TANH: tl.constexpr):
    """SiLU, or GELU's tanh approximation, of float32 ``x``, and its derivative."""
    if TANH:
        # tanh(y) = 2 * sigmoid(2y) - 1, so GELU is x * sigmoid(2y), with y = scale * (x + cube * x**3).
        share = tl.sigmoid(2 * _TANH_SCALE * (x + _TANH_CUBE * x * x * x))
        inner = 2 * _TANH_SCALE * (1 + 3 * _TANH_CUBE * x * x)
    else:
        share = tl.sigmoid(x)
        inner = 1.0
    return x * share, share * (1 + x * (1 - share) * inner)
