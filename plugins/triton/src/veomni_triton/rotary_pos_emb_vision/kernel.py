"""Device code of rotary_pos_emb_vision: both dimensions of a pair have cosines and sines of their own.

``first' = first * cos1 - second * sin1`` and ``second' = second * cos2 + first * sin2``. A pair's dimensions are either
``i`` of both halves, or neighbours, ``2i`` and ``2i + 1``.

Heads of vision towers are 72 or 80 wide. Padded to a power of two each, nearly half of a block would be empty. So the
pairs of several heads are laid out one after the other: 28 heads of 36 pairs fill 1008 entries of 1024.
"""

from __future__ import annotations

import triton
import triton.language as tl

from veomni_ops.triton_launches import triton_kernel

# B images or sequences, S patches, H heads of D = WIDTH dimensions, of which the first R = ROTATED are in pairs, and
# the others pass through. A row is one head of one patch, and a program has ROWS rows. With pairs of both halves, an
# entry of a block is a pair, and what passes through counts as pairs too: a row has R / 2 + (D - R) / 2 of them. With
# neighbours an entry is a dimension, and a row has D.


# Patches only mask: a number of them that is a multiple of 16 needs no kernel of its own.
@triton_kernel(do_not_specialize=["patches"])
def rotate_patches_kernel(
    q,  # [B, S, H, D] by its strides
    k,  # [B, S, H, D] likewise; None where only q is rotated
    cos,  # [B, S, R] by its strides
    sin,  # [B, S, R] likewise
    q_out,  # [B, S, H, D], written
    k_out,  # [B, S, H, D], written; None without k
    q_strides,  # of batch, patch and head in units of ALIGNED elements, and of dimension
    k_strides,
    cos_strides,  # of batch (0 where all share the angles) and patch in the same units, and of dimension
    sin_strides,
    q_out_strides,
    k_out_strides,
    patches,  # S
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROTATED: tl.constexpr,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,  # of a block
    ALIGNED: tl.constexpr,  # a power of two that divides R / 2, and every stride but those of dimensions
    NEIGHBOURS: tl.constexpr,  # pairs are neighbours, which takes R = D; else of both halves of the R dimensions
    TRANSPOSED: tl.constexpr,  # rotate gradients back
):
    """Rotate ``ROWS`` consecutive rows of q, and the same of k."""
    # One axis of programs, of which CUDA takes 2**31; of another axis it takes 65535, and a batch can have more.
    blocks = tl.cdiv(patches * HEADS, ROWS)
    batch, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    entry = tl.arange(0, 2 * PAIRS if NEIGHBOURS else PAIRS)  # [PAIRS] or [2 * PAIRS], as everything but pairs
    of_row: tl.constexpr = WIDTH if NEIGHBOURS else (WIDTH + 1) // 2  # an odd WIDTH lacks the last one
    row, place = block * ROWS + entry // of_row, entry % of_row
    patch, head = row // HEADS, row % HEADS
    inside = (entry < ROWS * of_row) & (patch < patches)
    patch = patch.to(tl.int64)  # a tensor can have more than 2**31 elements

    # Of the first and of the second of each pair, [PAIRS] in float32. All heads of a patch read the same, but for the
    # first from a cache.
    cos += (batch * cos_strides[0] + patch * cos_strides[1]) * ALIGNED
    sin += (batch * sin_strides[0] + patch * sin_strides[1]) * ALIGNED
    cosines = _load_pairs(cos, cos_strides[2], place, inside, ROTATED, ROTATED, NEIGHBOURS)
    sines = _load_pairs(sin, sin_strides[2], place, inside, ROTATED, ROTATED, NEIGHBOURS)
    if TRANSPOSED:
        # Forward is [[cos1, -sin1], [sin2, cos2]] on a pair, so this is [[cos1, sin2], [-sin1, cos2]].
        sines = (-sines[1], -sines[0])

    _rotate(
        q + (batch * q_strides[0] + patch * q_strides[1] + head * q_strides[2]) * ALIGNED,
        q_out + (batch * q_out_strides[0] + patch * q_out_strides[1] + head * q_out_strides[2]) * ALIGNED,
        q_strides[3], q_out_strides[3], place, inside, cosines, sines, WIDTH, ROTATED, NEIGHBOURS,
    )  # fmt: skip
    if k is not None:
        _rotate(
            k + (batch * k_strides[0] + patch * k_strides[1] + head * k_strides[2]) * ALIGNED,
            k_out + (batch * k_out_strides[0] + patch * k_out_strides[1] + head * k_out_strides[2]) * ALIGNED,
            k_strides[3], k_out_strides[3], place, inside, cosines, sines, WIDTH, ROTATED, NEIGHBOURS,
        )  # fmt: skip


@triton.jit
def _rotate(
    x,  # where each entry's row of D dimensions begins
    out,  # likewise, written
    x_stride,  # of a dimension
    out_stride,
    place,  # of each entry in its row
    inside,  # whether the entry exists
    cosines,
    sines,
    WIDTH: tl.constexpr,
    ROTATED: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
):
    first, second = _load_pairs(x, x_stride, place, inside, WIDTH, ROTATED, NEIGHBOURS)
    first_out = first * cosines[0] - second * sines[0]
    second_out = second * cosines[1] + first * sines[1]
    dtype: tl.constexpr = out.dtype.element_ty
    if NEIGHBOURS:
        both = tl.join(first_out.to(dtype), second_out.to(dtype)).reshape(place.shape)
        tl.store(out + place * out_stride, both, mask=inside)
    else:
        first_at, second_at = _dimensions(place, WIDTH, ROTATED)
        if ROTATED < WIDTH:
            is_rotated = place < ROTATED // 2
            first_out, second_out = tl.where(is_rotated, first_out, first), tl.where(is_rotated, second_out, second)
        tl.store(out + first_at * out_stride, first_out.to(dtype), mask=inside & (first_at < WIDTH))
        tl.store(out + second_at * out_stride, second_out.to(dtype), mask=inside & (second_at < WIDTH))


@triton.jit
def _load_pairs(
    x, stride, place, inside, WIDTH: tl.constexpr, ROTATED: tl.constexpr, NEIGHBOURS: tl.constexpr
):  # fmt: skip
    """The first and the second of each pair among ``WIDTH`` dimensions, ``[PAIRS]`` in float32; zeros beyond these."""
    if NEIGHBOURS:
        # One load of both, which reads consecutive addresses. A thread holds whole pairs, so none is exchanged.
        both = tl.load(x + place * stride, mask=inside, other=0.0)  # [2 * PAIRS]
        first, second = tl.split(both.reshape([place.shape[0] // 2, 2]))
    else:
        first_at, second_at = _dimensions(place, WIDTH, ROTATED)
        first = tl.load(x + first_at * stride, mask=inside & (first_at < WIDTH), other=0.0)
        second = tl.load(x + second_at * stride, mask=inside & (second_at < WIDTH), other=0.0)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def _dimensions(place, WIDTH: tl.constexpr, ROTATED: tl.constexpr):
    """Both dimensions of a pair: of the halves of the first ``ROTATED``, and then of those of the others."""
    half: tl.constexpr = ROTATED // 2
    if ROTATED < WIDTH:
        of_rest: tl.constexpr = (WIDTH - ROTATED + 1) // 2
        is_rotated = place < half
        first_at = tl.where(is_rotated, place, half + place)
        second_at = tl.where(is_rotated, half + place, half + of_rest + place)
    else:
        first_at, second_at = place, half + place
    return first_at, second_at
