"""Device code of rotary_pos_emb. Tiles are ``[POSITIONS, heads, R / 2]``, one per half of what is rotated."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rotate_kernel(
    q,
    k,
    cos,
    sin,
    q_out,
    k_out,
    q_strides,
    k_strides,
    cos_strides,
    sin_strides,
    q_out_strides,
    k_out_strides,
    positions,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    POSITIONS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    """Rotate all heads at ``POSITIONS`` in a row. Strides are of batch, position, head (not of angles), dimension."""
    batch = tl.program_id(1).to(tl.int64)
    position = (tl.program_id(0) * POSITIONS + tl.arange(0, POSITIONS)).to(tl.int64)[:, None, None]
    inside = position < positions
    cos_first, cos_second = _angles(cos, cos_strides, batch, position, inside, HALF)
    sin_first, sin_second = _angles(sin, sin_strides, batch, position, inside, HALF)
    if TRANSPOSED:
        sin_first, sin_second = -sin_second, -sin_first
    angles = (cos_first, cos_second, sin_first, sin_second)
    dtype: tl.constexpr = cos.dtype.element_ty
    _rotate_heads(q, q_out, q_strides, q_out_strides, batch, position, inside, angles, dtype, Q_HEADS, HALF, REST)
    _rotate_heads(k, k_out, k_strides, k_out_strides, batch, position, inside, angles, dtype, K_HEADS, HALF, REST)


@triton.jit
def _angles(angles, strides, batch, position, inside, HALF: tl.constexpr):
    """Both halves of cosines or sines, in float32."""
    pair = tl.arange(0, triton.next_power_of_2(HALF))[None, None, :]
    place = angles + batch * strides[0] + position * strides[1] + pair * strides[2]
    inside = inside & (pair < HALF)
    first = tl.load(place, mask=inside, other=0.0)
    second = tl.load(place + HALF * strides[2], mask=inside, other=0.0)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def _rotate_heads(
    x,
    out,
    x_strides,
    out_strides,
    batch,
    position,
    inside,
    angles,
    ANGLES: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
):
    cos_first, cos_second, sin_first, sin_second = angles
    head = tl.arange(0, triton.next_power_of_2(HEADS)).to(tl.int64)[None, :, None]
    inside = inside & (head < HEADS)
    x += batch * x_strides[0] + position * x_strides[1] + head * x_strides[2]
    out += batch * out_strides[0] + position * out_strides[1] + head * out_strides[2]
    # Where the angles have another dtype than x, PyTorch multiplies in float32.
    dtype: tl.constexpr = x.dtype.element_ty if x.dtype.element_ty == ANGLES else tl.float32

    pair = tl.arange(0, triton.next_power_of_2(HALF))[None, None, :]
    rotated = inside & (pair < HALF)
    first = tl.load(x + pair * x_strides[3], mask=rotated).to(tl.float32)
    second = tl.load(x + (HALF + pair) * x_strides[3], mask=rotated).to(tl.float32)
    first_out = _rounded(first * cos_first, dtype) - _rounded(second * sin_first, dtype)
    second_out = _rounded(second * cos_second, dtype) + _rounded(first * sin_second, dtype)
    tl.store(out + pair * out_strides[3], first_out, mask=rotated)
    tl.store(out + (HALF + pair) * out_strides[3], second_out, mask=rotated)

    if REST > 0:
        dimension = tl.arange(0, triton.next_power_of_2(REST))[None, None, :]
        passed = inside & (dimension < REST)
        dimension += 2 * HALF
        tl.store(out + dimension * out_strides[3], tl.load(x + dimension * x_strides[3], mask=passed), mask=passed)


@triton.jit
def _rounded(x, dtype: tl.constexpr):
    return x.to(dtype).to(tl.float32)
