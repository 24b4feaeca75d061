"""Device code of rotary_pos_emb.

Two dimensions of a head form a pair, which is rotated by an angle of the position: ``first' = first * cos - second *
sin`` and ``second' = second * cos + first * sin``. A pair's dimensions are either ``i`` of both halves, or neighbours,
``2i`` and ``2i + 1``. In either case its two values are brought to the same place of two blocks, so to one thread.
"""

from __future__ import annotations

import triton
import triton.language as tl

from veomni_ops.triton_launches import triton_kernel

# B batch, S positions, Hq and Hk heads of queries and keys, D dimensions of a head, of which R = 2 * HALF are rotated
# and REST = D - R pass through. Blocks are [POSITIONS, heads, HALF]; tl.arange needs powers of two, so heads and HALF
# are padded, and masked.


# Positions only mask: a number of them that is a multiple of 16 needs no kernel of its own.
@triton_kernel(do_not_specialize=["positions"])
def rotate_kernel(
    q,  # [B, S, Hq, D] by its strides, whichever of S and Hq comes first in memory
    k,  # [B, S, Hk, D] likewise; not read if Hk is 0
    cos,  # [B, S, HALF], one entry for each pair
    sin,  # [B, S, HALF]
    q_out,  # as q, written
    k_out,  # as k, written
    q_strides,  # of batch, position, head, dimension
    k_strides,
    cos_strides,  # of batch (0 where all sequences share the angles), position, pair
    sin_strides,
    q_out_strides,
    k_out_strides,
    positions,  # S
    direction,  # 1.0, or -1.0 to rotate by the negative angle
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    POSITIONS: tl.constexpr,
    READS_NEIGHBOURS: tl.constexpr,  # pairs are read from neighbours, else from both halves
    WRITES_NEIGHBOURS: tl.constexpr,  # and written to them
    LAST: tl.constexpr,  # the last R dimensions of a head are rotated, else the first R
):
    """Rotate all heads of queries and keys at ``POSITIONS`` consecutive positions of one sequence."""
    # One axis of programs, of which CUDA takes 2**31; of another axis it takes 65535, and a batch can have more.
    blocks = tl.cdiv(positions, POSITIONS)
    # int64, since a tensor can have more than 2**31 elements.
    batch, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    position = (block * POSITIONS + tl.arange(0, POSITIONS)).to(tl.int64)[:, None, None]  # [POSITIONS, 1, 1]
    inside = position < positions
    # [POSITIONS, 1, HALF] each: loaded once, and broadcast over the heads of both q and k.
    cosine = _angles(cos, cos_strides, batch, position, inside, HALF)
    sine = direction * _angles(sin, sin_strides, batch, position, inside, HALF)
    # The dtype is handed on, since the angles are float32 from here on, and it decides where results are rounded.
    angles: tl.constexpr = cos.dtype.element_ty
    _rotate_heads(
        q, q_out, q_strides, q_out_strides, batch, position, inside, cosine, sine, angles,
        Q_HEADS, HALF, REST, READS_NEIGHBOURS, WRITES_NEIGHBOURS, LAST,
    )  # fmt: skip
    if K_HEADS > 0:
        _rotate_heads(
            k, k_out, k_strides, k_out_strides, batch, position, inside, cosine, sine, angles,
            K_HEADS, HALF, REST, READS_NEIGHBOURS, WRITES_NEIGHBOURS, LAST,
        )  # fmt: skip


@triton.jit
def _angles(angles, strides, batch, position, inside, HALF: tl.constexpr):
    """The cosines or the sines, ``[POSITIONS, 1, HALF]`` in float32."""
    pair = tl.arange(0, triton.next_power_of_2(HALF))[None, None, :]
    place = angles + batch * strides[0] + position * strides[1] + pair * strides[2]
    return tl.load(place, mask=inside & (pair < HALF), other=0.0).to(tl.float32)


@triton.jit
def _rotate_heads(
    x,  # [B, S, HEADS, D] by its strides
    out,  # likewise, written
    x_strides,
    out_strides,
    batch,
    position,  # [POSITIONS, 1, 1]
    inside,  # [POSITIONS, 1, 1], whether the position exists
    cosine,  # [POSITIONS, 1, HALF]
    sine,  # [POSITIONS, 1, HALF]
    ANGLES: tl.constexpr,  # the dtype that the angles had
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    READS_NEIGHBOURS: tl.constexpr,
    WRITES_NEIGHBOURS: tl.constexpr,
    LAST: tl.constexpr,
):
    head = tl.arange(0, triton.next_power_of_2(HEADS)).to(tl.int64)[None, :, None]  # [1, HEADS, 1]
    # [POSITIONS, HEADS, 1], as x and out from here on.
    inside = inside & (head < HEADS)
    x += batch * x_strides[0] + position * x_strides[1] + head * x_strides[2]
    out += batch * out_strides[0] + position * out_strides[1] + head * out_strides[2]
    # The dtype in which PyTorch would multiply: where the angles have another one than x, float32.
    dtype: tl.constexpr = x.dtype.element_ty if x.dtype.element_ty == ANGLES else tl.float32

    rotated: tl.constexpr = REST if LAST else 0  # the first dimension that is rotated
    passed: tl.constexpr = 0 if LAST else 2 * HALF  # the first that is not
    # [POSITIONS, HEADS, HALF], as all blocks down to the stores.
    first, second = _load_pairs(x + rotated * x_strides[3], x_strides[3], inside, HALF, READS_NEIGHBOURS)
    # Each product is rounded, as PyTorch's separate operations do: the reference's bits. The last cast rounds the sum.
    first_out = _rounded(first * cosine, dtype) - _rounded(second * sine, dtype)
    second_out = _rounded(second * cosine, dtype) + _rounded(first * sine, dtype)
    first_out, second_out = first_out.to(out.dtype.element_ty), second_out.to(out.dtype.element_ty)
    out_rotated = out + rotated * out_strides[3]
    _store_pairs(out_rotated, out_strides[3], inside, first_out, second_out, HALF, WRITES_NEIGHBOURS)

    if REST > 0:
        # The output is a new tensor, so what isn't rotated is copied; without a cast, in x's dtype.
        dimension = tl.arange(0, triton.next_power_of_2(REST))[None, None, :]  # [1, 1, REST]
        mask = inside & (dimension < REST)
        dimension += passed
        tl.store(out + dimension * out_strides[3], tl.load(x + dimension * x_strides[3], mask=mask), mask=mask)


@triton.jit
def _load_pairs(x, stride, inside, HALF: tl.constexpr, NEIGHBOURS: tl.constexpr):
    """The first and the second of each pair, ``[POSITIONS, HEADS, HALF]`` in float32; ``x`` as ``inside``."""
    padded: tl.constexpr = triton.next_power_of_2(HALF)
    if NEIGHBOURS:
        # One load of both, which reads consecutive addresses. A thread holds whole pairs, so none is exchanged.
        dimension = tl.arange(0, 2 * padded)[None, None, :]
        both = tl.load(x + dimension * stride, mask=inside & (dimension < 2 * HALF))  # [POSITIONS, HEADS, 2 * HALF]
        first, second = tl.split(both.reshape([both.shape[0], both.shape[1], padded, 2]))
    else:
        pair = tl.arange(0, padded)[None, None, :]
        mask = inside & (pair < HALF)
        first = tl.load(x + pair * stride, mask=mask)
        second = tl.load(x + (HALF + pair) * stride, mask=mask)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def _store_pairs(out, stride, inside, first, second, HALF: tl.constexpr, NEIGHBOURS: tl.constexpr):
    """Write what :func:`_load_pairs` reads, in out's dtype."""
    padded: tl.constexpr = triton.next_power_of_2(HALF)
    if NEIGHBOURS:
        dimension = tl.arange(0, 2 * padded)[None, None, :]
        both = tl.join(first, second).reshape([first.shape[0], first.shape[1], 2 * padded])
        tl.store(out + dimension * stride, both, mask=inside & (dimension < 2 * HALF))
    else:
        pair = tl.arange(0, padded)[None, None, :]
        mask = inside & (pair < HALF)
        tl.store(out + pair * stride, first, mask=mask)
        tl.store(out + (HALF + pair) * stride, second, mask=mask)


@triton.jit
def _rounded(x, dtype: tl.constexpr):
    # float32 throughout, but with the values that ``dtype`` can hold.
    return x.to(dtype).to(tl.float32)
