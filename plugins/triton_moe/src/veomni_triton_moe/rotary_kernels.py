"""Device code of rotary_pos_emb.

Dimension ``i`` of a head's first half and ``i`` of its second half form a pair, which is rotated by an angle of the
position: ``first' = first * cos - second * sin`` and ``second' = second * cos + first * sin``. The halves are loaded as
two blocks, so that a pair stands at the same place of both, in one thread.
"""

from __future__ import annotations

import triton
import triton.language as tl

# B batch, S positions, Hq and Hk heads of queries and keys, D dimensions of a head, of which R = 2 * HALF are rotated
# and REST = D - R pass through. Blocks are [POSITIONS, heads, HALF]; tl.arange needs powers of two, so heads and HALF
# are padded, and masked.


@triton.jit
def rotate_kernel(
    q,  # [B, S, Hq, D] by its strides, whichever of S and Hq comes first in memory
    k,  # [B, S, Hk, D] likewise
    cos,  # [B, S, R]
    sin,  # [B, S, R]
    q_out,  # as q, written
    k_out,  # as k, written
    q_strides,  # of batch, position, head, dimension
    k_strides,
    cos_strides,  # of batch (0 where all sequences share the angles), position, dimension
    sin_strides,
    q_out_strides,
    k_out_strides,
    positions,  # S
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    POSITIONS: tl.constexpr,
    TRANSPOSED: tl.constexpr,  # the rotation back, which is the gradient
):
    """Rotate all heads of queries and keys at ``POSITIONS`` consecutive positions of one sequence."""
    # int64, since a tensor can have more than 2**31 elements.
    batch = tl.program_id(1).to(tl.int64)
    position = (tl.program_id(0) * POSITIONS + tl.arange(0, POSITIONS)).to(tl.int64)[:, None, None]  # [POSITIONS, 1, 1]
    inside = position < positions
    # [POSITIONS, 1, HALF] each: loaded once, and broadcast over the heads of both q and k. The halves are loaded apart,
    # since nothing says that they are equal.
    cos_first, cos_second = _angles(cos, cos_strides, batch, position, inside, HALF)
    sin_first, sin_second = _angles(sin, sin_strides, batch, position, inside, HALF)
    if TRANSPOSED:
        # The matrix of a pair is [[cos_first, -sin_first], [sin_second, cos_second]]; transposing it swaps the sines
        # with their signs.
        sin_first, sin_second = -sin_second, -sin_first
    # The dtype is handed on, since the angles are float32 from here on, and it decides where results are rounded.
    angles = (cos_first, cos_second, sin_first, sin_second)
    dtype: tl.constexpr = cos.dtype.element_ty
    _rotate_heads(q, q_out, q_strides, q_out_strides, batch, position, inside, angles, dtype, Q_HEADS, HALF, REST)
    _rotate_heads(k, k_out, k_strides, k_out_strides, batch, position, inside, angles, dtype, K_HEADS, HALF, REST)


@triton.jit
def _angles(angles, strides, batch, position, inside, HALF: tl.constexpr):
    """Both halves of the cosines or the sines, each ``[POSITIONS, 1, HALF]`` in float32."""
    pair = tl.arange(0, triton.next_power_of_2(HALF))[None, None, :]
    place = angles + batch * strides[0] + position * strides[1] + pair * strides[2]
    inside = inside & (pair < HALF)
    first = tl.load(place, mask=inside, other=0.0)
    second = tl.load(place + HALF * strides[2], mask=inside, other=0.0)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def _rotate_heads(
    x,  # [B, S, HEADS, D] by its strides
    out,  # likewise, written
    x_strides,
    out_strides,
    batch,
    position,  # [POSITIONS, 1, 1]
    inside,  # [POSITIONS, 1, 1], whether the position exists
    angles,  # four blocks [POSITIONS, 1, HALF]
    ANGLES: tl.constexpr,  # the dtype that the angles had
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
):
    cos_first, cos_second, sin_first, sin_second = angles
    head = tl.arange(0, triton.next_power_of_2(HEADS)).to(tl.int64)[None, :, None]  # [1, HEADS, 1]
    # [POSITIONS, HEADS, 1], as x and out from here on.
    inside = inside & (head < HEADS)
    x += batch * x_strides[0] + position * x_strides[1] + head * x_strides[2]
    out += batch * out_strides[0] + position * out_strides[1] + head * out_strides[2]
    # The dtype in which PyTorch would multiply: where the angles have another one than x, float32.
    dtype: tl.constexpr = x.dtype.element_ty if x.dtype.element_ty == ANGLES else tl.float32

    pair = tl.arange(0, triton.next_power_of_2(HALF))[None, None, :]  # [1, 1, HALF]
    # [POSITIONS, HEADS, HALF], as all blocks down to the stores.
    rotated = inside & (pair < HALF)
    first = tl.load(x + pair * x_strides[3], mask=rotated).to(tl.float32)
    second = tl.load(x + (HALF + pair) * x_strides[3], mask=rotated).to(tl.float32)
    # Each product is rounded, as PyTorch's separate operations do: the reference's bits. The store rounds the sum.
    first_out = _rounded(first * cos_first, dtype) - _rounded(second * sin_first, dtype)
    second_out = _rounded(second * cos_second, dtype) + _rounded(first * sin_second, dtype)
    tl.store(out + pair * out_strides[3], first_out, mask=rotated)
    tl.store(out + (HALF + pair) * out_strides[3], second_out, mask=rotated)

    if REST > 0:
        # The output is a new tensor, so what isn't rotated is copied; without a cast, in x's dtype.
        dimension = tl.arange(0, triton.next_power_of_2(REST))[None, None, :]  # [1, 1, REST]
        passed = inside & (dimension < REST)
        dimension += 2 * HALF
        tl.store(out + dimension * out_strides[3], tl.load(x + dimension * x_strides[3], mask=passed), mask=passed)


@triton.jit
def _rounded(x, dtype: tl.constexpr):
    # float32 throughout, but with the values that ``dtype`` can hold.
    return x.to(dtype).to(tl.float32)
