"""The launch of the rotation of patches: how many of them each program gets."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import gcd, prod

import torch
from torch import Tensor

from veomni_ops.sizes import ceil_div, power_of_two
from veomni_triton.rotary_pos_emb.launch import loadable
from veomni_triton.rotary_pos_emb_vision.kernel import rotate_patches_kernel


@dataclass(frozen=True)
class Launch:
    """Each program, of ``num_warps`` warps, has as many heads as fit into ``pairs`` pairs of dimensions."""

    pairs: int
    num_warps: int


# Four pairs for each thread. With 16 heads of 64, 72 and 80, nothing is faster by more than 5 % on an H200 of what
# `--tune` tries, in `benchmarks/rotary_pos_emb_vision/triton_rotary_pos_emb_vision.py`. With 78 of 80 dimensions in
# pairs, which can only be loaded one by one, eight pairs for each thread take 1.2 times as long.
LAUNCH = Launch(512, 4)

Strides = tuple[int, ...]


def rotate_patches(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, neighbours: bool, transposed: bool, launch: Launch
) -> tuple[Tensor, Tensor]:
    """Launch the rotation of ``q`` and ``k``.

    Args:
        q: ``[..., S, Hq, D]``, of any strides.
        k: ``[..., S, Hk, D]``.
        cos: ``[..., S, R]``, with q's leading dimensions, with none, or with ones.
        sin: Likewise.
        neighbours: Whether pairs are the dimensions ``2i`` and ``2i + 1``, which takes ``R = D``, else ``i`` and
            ``i + R/2``.
        transposed: Whether to rotate back, as gradients are.
        launch: Pairs per program, and its warps.

    Raises:
        ValueError: The shapes of ``cos`` or ``sin``, or of k, don't fit to q's.
    """
    _check(q, k, cos, sin, neighbours)
    contiguous = torch.contiguous_format
    q_out, k_out = (torch.empty_like(x, memory_format=contiguous) for x in (q, k))
    q_rows, k_rows = map(_in_four_dimensions, (q_out, k_out))
    q, k = (loadable(_in_four_dimensions(x)) for x in (q, k))
    cos, sin = (loadable(_in_three_dimensions(angles)) for angles in (cos, sin))
    settings = (cos, sin, neighbours, transposed, launch)
    with torch.cuda.device_of(q):
        if q.shape == k.shape:
            _rotate(q, k, q_rows, k_rows, *settings)
        else:
            _rotate(q, None, q_rows, None, *settings)
            _rotate(k, None, k_rows, None, *settings)
    return q_out, k_out


def _rotate(
    q: Tensor,
    k: Tensor | None,
    q_out: Tensor,
    k_out: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    neighbours: bool,
    transposed: bool,
    launch: Launch,
) -> None:
    """Launch the kernel for q ``[B, S, H, D]``, and for k where it is given, which then has q's shape."""
    batch, patches, heads, width = q.shape
    of_head = ceil_div(width, 2)
    pairs = max(launch.pairs, power_of_two(of_head))
    rows = pairs // of_head
    tensors = (q, k, cos, sin, q_out, k_out)
    aligned, strides = _in_units(tuple(_strides(q if each is None else each) for each in tensors), cos.shape[2] // 2)
    rotate_patches_kernel[(ceil_div(patches * heads, rows) * batch,)](
        *tensors,
        *strides,
        patches,
        HEADS=heads,
        WIDTH=width,
        ROTATED=cos.shape[2],
        ROWS=rows,
        PAIRS=pairs,
        ALIGNED=aligned,
        NEIGHBOURS=neighbours,
        TRANSPOSED=transposed,
        num_warps=launch.num_warps,
        enable_fp_fusion=False,  # a fused multiply-add would not round the product, which the reference does
    )


def _check(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, neighbours: bool) -> None:
    *leading, patches, _, width = q.shape
    if [*k.shape[:-2], k.shape[-1]] != [*leading, patches, width]:
        raise ValueError(f"k is {list(k.shape)}, but q {list(q.shape)}: expected the same, but for the heads")
    for name, angles in (("cos", cos), ("sin", sin)):
        *own, count = angles.shape[:-1]
        if count != patches or own not in (leading, [1] * min(len(own), len(leading))):
            shapes = f"{[*leading, patches]} patches: expected as many, or {patches} that all share"
            raise ValueError(f"{name} is for {[*own, count]}, but q has {shapes}")
    rotated = cos.shape[-1]
    if sin.shape[-1] != rotated or rotated % 2 or rotated > width:
        wanted = f"one even number, and at most a head's {width}"
        raise ValueError(f"cos and sin are for {rotated} and {sin.shape[-1]} dimensions, expected {wanted}")
    if neighbours and rotated != width:
        raise ValueError(f"neighbours are rotated in whole heads only, not in {rotated} of {width} dimensions")


def _in_four_dimensions(x: Tensor) -> Tensor:
    """``x[..., S, H, D]`` as ``[B, S, H, D]``. B is counted: without a patch, -1 would be ambiguous."""
    return x.reshape(prod(x.shape[:-3]), *x.shape[-3:])


def _in_three_dimensions(angles: Tensor) -> Tensor:
    """``angles[..., S, R]`` as ``[B, S, R]``, or as ``[1, S, R]`` where all share them."""
    return angles.reshape(prod(angles.shape[:-2]), *angles.shape[-2:])


def _strides(x: Tensor) -> Strides:
    """The strides; 0 for a batch of one, which may be angles that all share."""
    return (0 if x.shape[0] == 1 else x.stride(0), *x.stride()[1:])


@lru_cache(maxsize=1024)  # a call takes some microseconds otherwise
def _in_units(strides: tuple[Strides, ...], half: int) -> tuple[int, tuple[Strides, ...]]:
    """How many elements all rows and their second halves are aligned to, and the strides of rows in that unit.

    Triton sees for itself only that a stride is a multiple of 16. A head's is not, if it is 72, and then each value
    would be loaded alone: forward of 16384 patches takes 0.059 ms instead of 0.046 on an H200.
    """
    aligned = gcd(8, half, *(each for every in strides for each in every[:-1]))
    return aligned, tuple((*(each // aligned for each in every[:-1]), every[-1]) for every in strides)
