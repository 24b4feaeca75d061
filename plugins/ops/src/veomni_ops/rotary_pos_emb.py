"""rotary_pos_emb: ``(q[B, Hq, S, D], k[B, Hk, S, D], cos[B, S, R], sin[B, S, R], unsqueeze_dim=1) -> (q, k)``.

Rotates pairs of dimensions by position (Su et al. 2021). With ``unsqueeze_dim=2`` the layout is ``[B, S, H, D]``.
``cos`` and ``sin`` have q's dtype or float32, and a batch size of ``B`` or 1; they get no gradient. The results have
the dtypes of ``q`` and ``k``. Variants whose name starts with ``single`` take one tensor:
``(x, cos, sin, unsqueeze_dim=1) -> x``.

``LAYOUTS`` says per variant which layout of ``cos`` and ``sin`` a kernel may rely on. For ``full``, both halves are
equal, so a kernel may read either. A site is bound only if the outputs of the model's own rotary embedding have that
layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor

from veomni_ops import combinations
from veomni_ops.contract import Contract, Draw, Sample, SampleMaker, leaf
from veomni_ops.memory_places import alone
from veomni_ops.rotation import VALUES, AngleLayout, Turn, angles_between, rotate_half, rotate_pairs, turned


def full(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """Rotate every dimension in pairs ``(i, i + D/2)``, ``R = D`` (Llama).

    Args:
        q: queries ``[B, Hq, S, D]``, of any floating dtype.
        k: keys ``[B, Hk, S, D]``, of any floating dtype.
        cos, sin: cosines and sines of the angles, ``[B, S, R]`` or ``[1, S, R]``, in q's dtype or float32.
        unsqueeze_dim: the dimension of q and k that holds the heads; 2 for ``[B, S, H, D]``.

    Returns:
        The rotated queries and keys, with the shapes of ``q`` and ``k``. If ``cos`` is float32, they are computed in
        float32 and rounded at the end to the dtypes of ``q`` and ``k``. The variants below take and return the same.

    Example:
        >>> q, k = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 1, 1, 4), torch.zeros(1, 1, 1, 4)
        >>> cos, sin = torch.zeros(1, 1, 4), torch.ones(1, 1, 4)  # 90 degrees for every pair
        >>> q_rotated, k_rotated = full(q, k, cos, sin)
        >>> q_rotated.flatten()
        tensor([-3., -4.,  1.,  2.])
    """
    return _both(q, k, cos, sin, unsqueeze_dim, rotate_half)


def partial(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """:func:`full` in the first ``R`` dimensions (GPT-NeoX); the others pass through unchanged.

    Example:
        >>> q = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 1, 1, 4)
        >>> partial(q, q, cos=torch.zeros(1, 1, 2), sin=torch.ones(1, 1, 2))[0].flatten()  # 90 degrees
        tensor([-2.,  1.,  3.,  4.])
    """
    return _first(full, q, k, cos, sin, unsqueeze_dim)


def sign_flipped(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """:func:`full` in the other direction (nanochat).

    Example:
        >>> q = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 1, 1, 4)
        >>> sign_flipped(q, q, cos=torch.zeros(1, 1, 4), sin=torch.ones(1, 1, 4))[0].flatten()  # 90 degrees
        tensor([ 3.,  4., -1., -2.])
    """
    return full(q, k, cos, -sin, unsqueeze_dim)


def half_width(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """:func:`full` with ``cos[B, S, D/2]``, which both halves share (gpt-oss).

    Example:
        >>> q = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 1, 1, 4)
        >>> half_width(q, q, cos=torch.zeros(1, 1, 2), sin=torch.ones(1, 1, 2))[0].flatten()  # 90 degrees
        tensor([-3., -4.,  1.,  2.])
    """
    return full(q, k, torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1), unsqueeze_dim)


def pairwise(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """Rotate neighbours ``(2i, 2i + 1)``; ``cos[B, S, D]`` holds each pair's entry twice, side by side (Cohere).

    Example:
        >>> q = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 1, 1, 4)
        >>> pairwise(q, q, cos=torch.zeros(1, 1, 4), sin=torch.ones(1, 1, 4))[0].flatten()  # 90 degrees
        tensor([-2.,  1., -4.,  3.])
    """
    return _both(q, k, cos, sin, unsqueeze_dim, rotate_pairs)


def pairwise_partial(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """:func:`pairwise` in the first ``R`` dimensions (GLM-4V); the others pass through unchanged.

    Example:
        >>> q = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 1, 1, 4)
        >>> pairwise_partial(q, q, cos=torch.zeros(1, 1, 2), sin=torch.ones(1, 1, 2))[0].flatten()
        tensor([-2.,  1.,  3.,  4.])
    """
    return _first(pairwise, q, k, cos, sin, unsqueeze_dim)


def interleaved(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """Rotate neighbours ``(2i, 2i + 1)`` by the first half of ``cos[B, S, D]``, one entry per pair (Ernie 4.5).

    Example:
        >>> q = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 1, 1, 4)
        >>> cos, sin = torch.tensor([[[0.0, 1.0, 5.0, 5.0]]]), torch.tensor([[[1.0, 0.0, 5.0, 5.0]]])
        >>> interleaved(q, q, cos, sin)[0].flatten()  # the first pair by 90 degrees; no 5 is read
        tensor([-2.,  1.,  3.,  4.])
    """
    cos, sin = (_first_half(x).repeat_interleave(2, dim=-1) for x in (cos, sin))
    return pairwise(q, k, cos, sin, unsqueeze_dim)


def interleaved_partial(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """:func:`interleaved` in the first ``R`` dimensions (GLM-4); the others pass through unchanged.

    Example:
        >>> q = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]).view(1, 1, 1, 6)
        >>> cos, sin = torch.tensor([[[0.0, 1.0, 5.0, 5.0]]]), torch.tensor([[[1.0, 0.0, 5.0, 5.0]]])
        >>> interleaved_partial(q, q, cos, sin)[0].flatten()  # the first pair by 90 degrees; no 5 is read
        tensor([-2.,  1.,  3.,  4.,  5.,  6.])
    """
    return _first(interleaved, q, k, cos, sin, unsqueeze_dim)


def deinterleaved(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """:func:`full` after moving even dimensions into the first half and odd ones into the second (DeepSeek-V3).

    Only the first half of ``cos[B, S, D]`` is used.

    Example:
        >>> q = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 1, 1, 4)
        >>> deinterleaved(q, q, cos=torch.ones(1, 1, 4), sin=torch.zeros(1, 1, 4))[0].flatten()  # 0 degrees
        tensor([1., 3., 2., 4.])
    """
    q, k = (torch.cat((x[..., ::2], x[..., 1::2]), dim=-1) for x in (q, k))
    return half_width(q, k, _first_half(cos), _first_half(sin), unsqueeze_dim)


def single(x: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Tensor:
    """:func:`full` of one tensor (Gemma 4). :func:`single_tail` takes and returns the same.

    Args:
        x: queries or keys ``[B, H, S, D]``, of any floating dtype.
        cos, sin: ``[B, S, R]`` or ``[1, S, R]``, in x's dtype or float32.
        unsqueeze_dim: the dimension of x that holds the heads; 2 for ``[B, S, H, D]``.

    Returns:
        ``x`` rotated, in its shape and dtype.

    Example:
        >>> x = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 1, 1, 4)
        >>> single(x, cos=torch.zeros(1, 1, 4), sin=torch.ones(1, 1, 4)).flatten()  # 90 degrees
        tensor([-3., -4.,  1.,  2.])
    """
    return turned(x, cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim))


def single_tail(x: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Tensor:
    """Rotate neighbours ``(2i, 2i + 1)`` in the last ``2R`` dimensions of one tensor (DeepSeek-V4).

    The other dimensions pass through unchanged. ``cos[B, S, R]`` holds each pair's entry once.

    Example:
        >>> x = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 1, 1, 4)
        >>> single_tail(x, cos=torch.zeros(1, 1, 1), sin=torch.ones(1, 1, 1)).flatten()  # 90 degrees
        tensor([ 1.,  2., -4.,  3.])
    """
    cos, sin = (angles.repeat_interleave(2, dim=-1).unsqueeze(unsqueeze_dim) for angles in (cos, sin))
    width = cos.shape[-1]
    return torch.cat((x[..., :-width], turned(x[..., -width:], cos, sin, rotate_pairs)), dim=-1)


def _both(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int, turn: Turn) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return turned(q, cos, sin, turn), turned(k, cos, sin, turn)


def _first(
    rotation: Callable[..., tuple[Tensor, Tensor]], q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int
) -> tuple[Tensor, Tensor]:
    width = cos.shape[-1]
    q_rotated, k_rotated = rotation(q[..., :width], k[..., :width], cos, sin, unsqueeze_dim)
    return torch.cat((q_rotated, q[..., width:]), dim=-1), torch.cat((k_rotated, k[..., width:]), dim=-1)


def _first_half(angles: Tensor) -> Tensor:
    return angles[..., : angles.shape[-1] // 2]


class _Shape(NamedTuple):
    """``rotated`` counts for variants that rotate a part of a head's ``width`` dimensions; the others rotate all."""

    name: str
    batch: int
    heads: tuple[int, int]
    length: int
    width: int
    rotated: int


_SMALL = (
    _Shape("grouped heads, transposed", 2, (4, 2), 7, 64, 16),
    _Shape("one key head", 1, (8, 1), 33, 80, 32),
    _Shape("one position", 3, (2, 2), 1, 32, 24),
)
# Checked for values and gradients alone.
_EDGES = (
    _Shape("past 64 positions", 1, (2, 1), 65, 96, 24),
    _Shape("groups of eight", 3, (16, 2), 3, 72, 48),
    _Shape("one pair", 1, (2, 1), 4, 2, 2),
    _Shape("pairs that fill no vector", 2, (3, 1), 5, 22, 6),
)
_BEYOND_A_TILE = (
    _Shape("past 128 positions", 2, (3, 1), 193, 64, 40),
    _Shape("past 32 heads", 1, (64, 8), 9, 112, 56),
    _Shape("wide heads", 1, (2, 2), 5, 256, 192),
    _Shape("40 heads", 1, (40, 8), 3, 48, 32),
    _Shape("96 heads", 1, (96, 12), 3, 32, 16),
)
_LARGE = (
    _Shape("a model's heads", 2, (32, 8), 4099, 128, 64),
    _Shape("past 65535 positions", 1, (2, 1), 65_539, 64, 32),
)


class _Drawn:
    """Draws heads and angles for one variant's samples.

    ``arity`` is the number of tensors to rotate, and ``whole`` whether all of a head's dimensions are rotated.
    """

    def __init__(self, draw: Draw, arity: int, whole: bool, layout: AngleLayout) -> None:
        self._draw, self._arity, self._whole, self._layout = draw, arity, whole, layout

    def angles(
        self, batch: int, length: int, head: int, rotated: int, dtype: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor]:
        drawn = self._draw.normal(batch, length, (head if self._whole else rotated) // 2, scale=2.0)
        spread = self._layout.spread(drawn.float())
        return spread.cos().to(dtype or self._draw.dtype), spread.sin().to(dtype or self._draw.dtype)

    def heads(self, batch: int, counts: tuple[int, int], length: int, head: int) -> tuple[Tensor, ...]:
        both = (leaf(self._draw.normal(batch, length, count, head).transpose(1, 2)) for count in counts[: self._arity])
        return tuple(both)

    def shaped(self, shapes: tuple[_Shape, ...], values_only: bool = False) -> Iterator[Sample]:
        for name, batch, counts, length, head, rotated in shapes:
            call = (*self.heads(batch, counts, length, head), *self.angles(batch, length, head, rotated))
            yield Sample(name, call, values_only=values_only)

    def together(self) -> Iterator[Sample]:
        """With ``values_only``: shapes, layouts and kinds of angles, each two of them."""

        def make(
            batch: int,
            heads: tuple[int, int],
            length: int,
            width: int,
            quarters: int,
            first: str,
            layout: str,
            angles: str,
        ) -> Sample:
            shapes = [(length, count) if first == "sequence" else (count, length) for count in heads[: self._arity]]
            tensors = (combinations.laid_out(self._draw.normal(batch, *shape, width), layout) for shape in shapes)
            kind = torch.float32 if "float32" in angles else None
            call = (
                *tensors,
                *self.angles(1 if "shared" in angles else batch, length, width, width * quarters // 4, kind),
            )
            return Sample("", call, {"unsqueeze_dim": 2} if first == "sequence" else {})

        shapes = {"batch": (1, 3, 5), "heads": ((5, 1), (16, 2), (1, 1)), "length": (10, 66), "width": (80, 96, 144)}
        kinds = {
            "first": ("heads", "sequence"),
            "layout": combinations.LAYOUTS,
            "angles": ("own", "shared", "own float32", "shared float32"),
        }
        yield from combinations.together(make, **shapes, quarters=(1, 2, 3), **kinds)

    def edges(self) -> Iterator[Sample]:
        """With ``values_only``: widths and counts, and arguments of kinds that models seldom pass."""
        yield from self.shaped(_EDGES, values_only=True)
        angles = tuple(map(leaf, self.angles(2, 5, 48, 32)))  # as of trained frequencies: they still get no gradient
        yield Sample("angles that want gradients", (*self.heads(2, (4, 2), 5, 48), *angles), values_only=True)
        heads = (leaf(x.detach().transpose(1, 2)) for x in self.heads(3, (4, 2), 9, 32))
        angles = self.angles(1, 9, 32, 8, torch.float32)
        call = (*heads, *angles)
        yield Sample("sequence before heads, shared angles", call, {"unsqueeze_dim": 2}, values_only=True)
        row = [alone(x) for x in self.heads(1, (2, 2), 5, 48)]
        queries = row[:1] * len(row)  # gradients of both uses add up
        yield Sample("queries that are the keys", (*queries, *self.angles(1, 5, 48, 24)), values_only=True)
        cos = torch.ones_like(self.angles(1, 1, 32, 16)[0])  # of the first position
        yield Sample("results equal to the heads", (*self.heads(2, (4, 2), 1, 32), cos, 0 * cos), values_only=True)
        yield from self.shaped((_Shape("sixteen heads, one key head", 1, (16, 1), 3, 40, 24),), values_only=True)
        heads = (leaf(x.detach().transpose(1, 2)) for x in self.heads(1, (24, 3), 3, 32))
        call = (*heads, *self.angles(1, 3, 32, 16))
        yield Sample("sequence before 24 heads", call, {"unsqueeze_dim": 2}, values_only=True)
        between = angles_between(self.angles(1, 9, 64, 32)[0], self._draw.dtype)
        yield Sample("float32 between other angles", (*self.heads(2, (4, 2), 9, 64), *between), values_only=True)


def _shaped(shapes: tuple[_Shape, ...], arity: int, whole: bool, layout: AngleLayout) -> SampleMaker:
    def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
        draw = Draw(device, dtype)
        drawn = _Drawn(draw, arity, whole, layout)
        yield from drawn.shaped(shapes)
        if shapes is _BEYOND_A_TILE:
            yield from drawn.together()
            yield from drawn.shaped((_Shape("heads of 512", 1, (2, 1), 3, 512, 320),))
            for dim, first in ((1, "heads"), (2, "sequence")):
                parts = draw.normal(2, 9, 8, 128).split((4, 2, 2), dim=2)[:arity]
                call = (*(leaf(x.transpose(1, 3 - dim)) for x in parts), *drawn.angles(1, 9, 128, 64))
                yield Sample(f"128 wide parts of one projection, {first} first", call, {"unsqueeze_dim": dim})

    return samples


def _samples(arity: int, whole: bool, layout: AngleLayout) -> SampleMaker:
    def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
        draw = Draw(device, dtype)
        drawn = _Drawn(draw, arity, whole, layout)
        heads, angles = drawn.heads, drawn.angles
        yield from drawn.shaped(_SMALL)
        yield Sample("angles shared by the batch", (*heads(2, (2, 2), 5, 32), *angles(1, 5, 32, 16)))
        yield Sample("angles in float32", (*heads(2, (4, 2), 5, 64), *angles(2, 5, 64, 32, torch.float32)))
        tensors = (leaf(draw.normal(2, 9, count, 64)) for count in (4, 2)[:arity])
        yield Sample("sequence before heads", (*tensors, *angles(2, 9, 64, 16)), {"unsqueeze_dim": 2})
        tensors = (leaf(draw.normal(2, count, 5, 64)) for count in (4, 1)[:arity])
        yield Sample("contiguous", (*tensors, *angles(2, 5, 64, 48)))
        yield from drawn.edges()

    return samples


# A reference, the layout of its angles, and whether it rotates all dimensions of a head.
_REFERENCES: tuple[tuple[Callable[..., Any], AngleLayout, bool], ...] = (
    (full, AngleLayout.HALVES, True),
    (partial, AngleLayout.HALVES, False),
    (sign_flipped, AngleLayout.HALVES, True),
    (half_width, AngleLayout.ONCE, True),
    (pairwise, AngleLayout.NEIGHBOURS, True),
    (pairwise_partial, AngleLayout.NEIGHBOURS, False),
    (interleaved, AngleLayout.UNRELATED, True),
    (interleaved_partial, AngleLayout.UNRELATED, False),
    (deinterleaved, AngleLayout.UNRELATED, True),
    (single, AngleLayout.HALVES, True),
    (single_tail, AngleLayout.ONCE, False),
)
LAYOUTS = {reference.__name__: layout for reference, layout, _ in _REFERENCES}


def _contract(reference: Callable[..., Any], layout: AngleLayout, whole: bool) -> Contract:
    arity = len(signature(reference).parameters) - 3
    return Contract(
        op_name="rotary_pos_emb",
        variant=reference.__name__,
        reference=reference,
        samples=_samples(arity, whole, layout),
        values=VALUES,
        gradients=VALUES,
        beyond_a_tile=_shaped(_BEYOND_A_TILE, arity, whole, layout),
        large=_shaped(_LARGE, arity, whole, layout),
        rows=("q", "k", "x", "cos", "sin"),
    )


CONTRACTS = {reference.__name__: _contract(reference, layout, whole) for reference, layout, whole in _REFERENCES}
