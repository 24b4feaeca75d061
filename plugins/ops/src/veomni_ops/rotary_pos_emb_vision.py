"""rotary_pos_emb_vision: ``(q[..., S, H, D], k[..., S, H, D], cos[..., S, R], sin[..., S, R]) -> (q, k)``.

The rotary position embedding of vision towers, computed in float32 and rounded once to the dtypes of ``q`` and ``k``.
A kernel must read every entry of ``cos`` and ``sin`` and may not assume equal halves, since vision towers lay out the
angles of rows and columns differently. ``cos`` and ``sin`` have q's dtype or float32, and either q's leading dimensions
or none; they get no gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from veomni_ops.combinations import LAYOUTS, laid_out, together
from veomni_ops.contract import Contract, Draw, Sample, compute_dtype, leaf
from veomni_ops.memory_places import alone
from veomni_ops.rotation import VALUES, AngleLayout, Turn, angles_between, rotate_half, rotate_pairs, turned


def full(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate every dimension in pairs ``(i, i + D/2)``, ``R = D`` (Qwen2-VL).

    Args:
        q, k: queries and keys ``[..., S, H, D]``, of any floating dtype.
        cos, sin: cosines and sines of the angles, ``[..., S, R]`` or ``[S, R]``, in q's dtype or float32.

    Returns:
        The rotated queries and keys, with the shapes and dtypes of ``q`` and ``k``.

    Example:
        >>> q = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 1, 4)  # one patch, one head
        >>> q_rotated, _ = full(q, q, cos=torch.zeros(1, 4), sin=torch.tensor([[1.0, 1.0, 10.0, 10.0]]))
        >>> q_rotated.flatten()  # each half has its own angles
        tensor([-3., -4., 10., 20.])
    """
    return _wide(q, cos, sin, rotate_half), _wide(k, cos, sin, rotate_half)


def pairwise(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate neighbours ``(2i, 2i + 1)``, ``R = D`` (Inkling 2).

    Takes and returns what :func:`full` does.

    Example:
        >>> q = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 1, 4)
        >>> q_rotated, _ = pairwise(q, q, cos=torch.zeros(1, 4), sin=torch.ones(1, 4))  # 90 degrees
        >>> q_rotated.flatten()
        tensor([-2.,  1., -4.,  3.])
    """
    return _wide(q, cos, sin, rotate_pairs), _wide(k, cos, sin, rotate_pairs)


def partial(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`full` in the first ``R`` dimensions (MiniMax-M3-VL); the others pass through unchanged.

    Takes and returns what :func:`full` does, with ``R`` of at most ``D``.

    Example:
        >>> q = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 1, 4)
        >>> q_rotated, _ = partial(q, q, cos=torch.zeros(1, 2), sin=torch.ones(1, 2))  # 90 degrees
        >>> q_rotated.flatten()
        tensor([-2.,  1.,  3.,  4.])
    """
    width = cos.shape[-1]
    turned_q, turned_k = full(q[..., :width], k[..., :width], cos, sin)
    return torch.cat((turned_q, q[..., width:]), dim=-1), torch.cat((turned_k, k[..., width:]), dim=-1)


def _wide(x: Tensor, cos: Tensor, sin: Tensor, turn: Turn) -> Tensor:
    wide = compute_dtype(x)
    return turned(x.to(wide), cos.unsqueeze(-2).to(wide), sin.unsqueeze(-2).to(wide), turn).to(x.dtype)


# How many of a head's dimensions are rotated, by its width, where a part of them is (78 of 80: MiniMax-M3-VL).
_PARTS = {2: 2, 32: 24, 64: 16, 72: 48, 80: 78, 96: 40, 112: 56, 128: 96}


def _samples(device: torch.device, dtype: torch.dtype, whole: bool) -> Iterator[Sample]:
    draw = Draw(device, dtype)

    def angles(*shape: int, angle_dtype: torch.dtype = dtype) -> tuple[Tensor, Tensor]:
        pairs = (shape[-1] if whole else _PARTS[shape[-1]]) // 2
        spread = AngleLayout.UNRELATED.spread(draw.normal(*shape[:-1], pairs, scale=2.0).float())
        return spread.cos().to(angle_dtype), spread.sin().to(angle_dtype)

    def heads(*shape: int) -> Tensor:
        return leaf(draw.normal(*shape))

    yield Sample("patches of images", (heads(37, 4, 80), heads(37, 4, 80), *angles(37, 80)))
    q, k, _ = draw.normal(13, 3, 2, 64).unbind(1)  # as views of one packed projection
    yield Sample("cut out of one tensor", (leaf(q), leaf(k), *angles(13, 64)))
    yield Sample("one patch", (heads(1, 2, 32), heads(1, 2, 32), *angles(1, 32)))
    yield Sample("angles shared by a batch", (heads(2, 5, 4, 64), heads(2, 5, 4, 64), *angles(5, 64)))
    yield Sample("a batch", (heads(3, 5, 4, 72), heads(3, 5, 4, 72), *angles(3, 5, 72)))
    wide = angles(9, 64, angle_dtype=torch.float32)
    yield Sample("angles in float32", (heads(9, 4, 64), heads(9, 4, 64), *wide))
    yield Sample("five dimensions", (*(heads(2, 3, 5, 4, 96) for _ in "qk"), *angles(5, 96)), values_only=True)
    yield Sample("past 64 patches", (*(heads(65, 2, 112) for _ in "qk"), *angles(65, 112)), values_only=True)
    yield Sample("one pair", (*(heads(3, 7, 2) for _ in "qk"), *angles(3, 2)), values_only=True)
    wanting = tuple(map(leaf, angles(1, 5, 64)))  # as of trained frequencies: they still get no gradient
    rows = (alone(heads(1, 5, 4, 64)) for _ in "qk")
    yield Sample("angles that want gradients", (*rows, *wanting), values_only=True)
    both = heads(2, 5, 4, 32)  # gradients of both uses add up
    yield Sample("queries that are the keys", (both, both, *angles(2, 5, 32)), values_only=True)
    ones = torch.ones_like(angles(1, 32)[0])
    yield Sample("results equal to the heads", (heads(1, 2, 32), heads(1, 2, 32), ones, ones * 0), values_only=True)
    between = angles_between(angles(9, 64)[0], dtype)
    yield Sample("float32 between other angles", (heads(9, 4, 64), heads(9, 4, 64), *between), values_only=True)


def _patches(device: torch.device, dtype: torch.dtype, whole: bool, shapes: tuple[_Shape, ...]) -> Iterator[Sample]:
    draw = Draw(device, dtype)
    for count, heads, width in shapes:
        rotated = width if whole else _PARTS[width]
        spread = AngleLayout.UNRELATED.spread(draw.normal(count, rotated // 2, scale=2.0).float())
        q, k = (leaf(draw.normal(count, heads, width)) for _ in range(2))
        yield Sample(f"{count} patches", (q, k, spread.cos().to(dtype), spread.sin().to(dtype)))
    if shapes is not _BEYOND_A_TILE:
        return

    def make(patches: tuple[int, ...], heads: int, width: int, layout: str, angles: str) -> Sample:
        tensors = (laid_out(draw.normal(*patches, heads, width), layout) for _ in "qk")
        pairs = (width if whole else _PARTS[width]) // 2
        own = patches if "shared" not in angles else patches[-1:]
        spread = AngleLayout.UNRELATED.spread(draw.normal(*own, pairs, scale=2.0).float())
        kind = torch.float32 if "float32" in angles else dtype
        return Sample("", (*tensors, spread.cos().to(kind), spread.sin().to(kind)))

    kinds = {"layout": LAYOUTS, "angles": ("own", "shared", "own float32", "shared float32")}
    patches = ((10,), (66,), (3, 10), (2, 3, 5))
    yield from together(make, patches=patches, heads=(1, 3, 16), width=(72, 80, 96, 128), **kinds)


_Shape = tuple[int, int, int]  # patches, heads, a head's width
_BEYOND_A_TILE: tuple[_Shape, ...] = ((1025, 3, 80), (9, 40, 128))
_LARGE: tuple[_Shape, ...] = ((65_539, 16, 80),)


def _contract(reference: Callable[..., tuple[Tensor, Tensor]], whole: bool = True) -> Contract:
    return Contract(
        op_name="rotary_pos_emb_vision",
        variant=reference.__name__,
        reference=reference,
        samples=functools.partial(_samples, whole=whole),
        values=VALUES,
        gradients=VALUES,
        beyond_a_tile=functools.partial(_patches, whole=whole, shapes=_BEYOND_A_TILE),
        large=functools.partial(_patches, whole=whole, shapes=_LARGE),
        rows=("q", "k", "cos", "sin"),
    )


CONTRACTS = {
    contract.variant: contract for contract in (_contract(full), _contract(partial, whole=False), _contract(pairwise))
}
