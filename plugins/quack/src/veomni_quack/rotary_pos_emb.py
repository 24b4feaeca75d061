"""Rotary position embedding by QuACK: one kernel per tensor, in float32, rounded once; backward turns the other way.

QuACK takes one table of angles, each pair's entry once, and an offset into it per sequence. Angles that differ by
sequence, ``cos[B, S, R]``, are such a table of ``B * S`` positions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from quack.rotary import apply_rotary
from torch import Tensor

from veomni_core.ops.first_derivatives import first_derivatives_only
from veomni_quack.alignment import operator, readable
from veomni_quack.compiling import check_target

check_target()

Pick = Callable[[Tensor], Tensor]
_UNIT = 8  # values: what QuACK asks head widths and their turned parts to be multiples of
_WIDEST_HEAD = 512


def _first_half(angles: Tensor) -> Tensor:
    return angles[..., : angles.shape[-1] // 2]


def _every_other(angles: Tensor) -> Tensor:
    return angles[..., ::2].contiguous()


def _all(angles: Tensor) -> Tensor:
    return angles


def _rotation(
    pick: Pick, neighbours: bool = False, backwards: bool = False, whole: bool = True
) -> Callable[..., tuple[Tensor, Tensor]]:
    """A variant: which entries of ``cos`` and ``sin`` count, whether neighbours are pairs, the direction, and whether
    whole heads are turned.
    """

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        """``q[B, Hq, S, D]`` and ``k[B, Hk, S, D]`` turned by ``cos[B, S, R]`` and ``sin``; in ``[B, S, H, D]`` where
        ``unsqueeze_dim`` is 2. Dimensions beyond the turned ones pass through. Angles get no gradient.

        Raises:
            ValueError: a head's width, or its turned part, is no multiple of 8, or it is wider than 512; ``cos`` turns
                only a part where the variant turns whole heads; ``unsqueeze_dim`` is neither 1 nor 2.
        """
        angles = _Angles(pick(cos), pick(sin), neighbours, backwards, whole)
        return angles.turn(q, unsqueeze_dim), angles.turn(k, unsqueeze_dim)

    return rotate


full = _rotation(_first_half)
partial = _rotation(_first_half, whole=False)
sign_flipped = _rotation(_first_half, backwards=True)
half_width = _rotation(_all)
pairwise = _rotation(_every_other, neighbours=True)
pairwise_partial = _rotation(_every_other, neighbours=True, whole=False)
interleaved = _rotation(_first_half, neighbours=True)
interleaved_partial = _rotation(_first_half, neighbours=True, whole=False)


def single(x: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Tensor:
    """:func:`full` of one tensor (Gemma 4)."""
    angles = _Angles(_first_half(cos), _first_half(sin), neighbours=False, backwards=False, whole=True)
    return angles.turn(x, unsqueeze_dim)


class _Angles:
    """``cos`` and ``sin`` ``[B or 1, S, pairs]`` as QuACK reads them."""

    def __init__(self, cos: Tensor, sin: Tensor, neighbours: bool, backwards: bool, whole: bool) -> None:
        batch, length, self.pairs = cos.shape
        # Copied here if at all: two tensors are turned by one table, and back again.
        self.cos, self.sin = (readable(angles.detach().reshape(batch * length, self.pairs)) for angles in (cos, sin))
        self.starts = length * torch.arange(batch, dtype=torch.int32, device=cos.device) if batch > 1 else None
        self.neighbours, self.backwards, self.whole = neighbours, backwards, whole

    def turn(self, x: Tensor, unsqueeze_dim: int) -> Tensor:
        """``x``, turned; in the layout in which it came."""
        width, turned = x.shape[-1], 2 * self.pairs
        if width % _UNIT or turned % _UNIT or width > _WIDEST_HEAD:
            raise ValueError(
                f"quack turns heads whose width, at most {_WIDEST_HEAD}, and turned part are multiples of {_UNIT}; "
                f"this head has {width} dimensions, {turned} of them turned. Choose another rotary_pos_emb kernel."
            )
        if self.whole and turned != width:
            raise ValueError(f"cos turns {turned} of a head's {width} dimensions; this variant turns all of them")
        if unsqueeze_dim not in (1, 2):
            raise ValueError(f"unsqueeze_dim is {unsqueeze_dim}, expected 1 or 2")
        heads_first = unsqueeze_dim == 1
        by_position = x.transpose(1, 2) if heads_first else x
        result: Tensor = _Turn.apply(by_position, self.cos, self.sin, self.starts, self.neighbours, self.backwards)
        return result.transpose(1, 2) if heads_first else result


def _turned(x: Tensor, cos: Tensor, sin: Tensor, starts: Tensor | None, neighbours: bool, backwards: bool) -> Tensor:
    result: Tensor = apply_rotary(
        readable(x),
        readable(cos),
        readable(sin),
        seqlen_offsets=starts,
        interleaved=neighbours,
        conjugate=backwards,
    )
    return result


_turn = operator(
    "rotary_pos_emb(Tensor x, Tensor cos, Tensor sin, Tensor? starts, bool neighbours, bool backwards) -> Tensor",
    _turned,
)


class _Turn(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, starts: Tensor | None, neighbours: bool, backwards: bool
    ) -> Tensor:
        ctx.save_for_backward(cos, sin, starts)
        ctx.neighbours, ctx.backwards = neighbours, backwards
        return _turn(x, cos, sin, starts, neighbours, backwards)  # type: ignore[no-any-return]

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, dresult: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin, starts = ctx.saved_tensors
        gradient = _turn(dresult, cos, sin, starts, ctx.neighbours, not ctx.backwards)
        return gradient, None, None, None, None, None
