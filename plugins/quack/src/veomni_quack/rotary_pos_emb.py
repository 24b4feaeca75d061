"""Rotary position embedding by QuACK: one kernel per tensor, computed in float32 and rounded once.

Backward is the same kernel with the opposite rotation (``conjugate``). QuACK takes one cos/sin table
``[positions, pairs]`` with one entry per rotated pair of dimensions, where transformers stores each entry twice, and
for each sequence an offset into that table. Angles that differ by sequence, ``cos[B, S, R]``, become a table of
``B * S`` positions with the offsets ``0, S, 2S, ...``. It takes heads and rotary widths in multiples of 8. Of others, a
copy of the rotated dimensions is filled up with pairs of zeros.

Shapes: B batch, S sequence length, H heads (Hq of queries, Hk of keys), D head width, R rotary width, P = pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from quack.rotary import apply_rotary
from torch import Tensor
from torch.nn import functional as F

from veomni_core.kernels import first_derivatives_only
from veomni_ops.torch_operators import operator
from veomni_quack.alignment import readable
from veomni_quack.compiling import check_target

check_target()

Pick = Callable[[Tensor], Tensor]
_UNIT = 8  # QuACK needs the head width and the rotary width to be multiples of this many values
_PAIRS = _UNIT // 2
_WIDEST_HEAD = 512
_MOST_SEQUENCES = 65535  # one axis of QuACK's launch is the batch, of which CUDA takes no more


def _first_half(angles: Tensor) -> Tensor:
    return angles[..., : angles.shape[-1] // 2]


def _every_other(angles: Tensor) -> Tensor:
    return angles[..., ::2].contiguous()


def _rotation(
    pick: Pick, neighbours: bool = False, backwards: bool = False, whole: bool = True
) -> Callable[..., tuple[Tensor, Tensor]]:
    """The kernel of one variant.

    Args:
        pick: Selects the entries of ``cos`` and ``sin`` that QuACK needs, one per pair.
        neighbours: Pairs are ``(2i, 2i + 1)`` instead of ``(i, i + R/2)``.
        backwards: Rotate by the negative angle.
        whole: The rotary width must be the head width.
    """

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        """``q[B, Hq, S, D]`` and ``k[B, Hk, S, D]`` rotated by ``cos[B, S, R]`` and ``sin[B, S, R]``.

        The layout is ``[B, S, H, D]`` if ``unsqueeze_dim`` is 2. Dimensions beyond the rotary width pass through
        unchanged. ``cos`` and ``sin`` get no gradient.

        Raises:
            ValueError: the head is wider than 512; ``cos`` covers only a part of the head where the variant rotates
                all of it; ``unsqueeze_dim`` is neither 1 nor 2.
        """
        angles = _Angles(pick(cos), pick(sin), neighbours, backwards, whole)
        return angles.turn(q, unsqueeze_dim), angles.turn(k, unsqueeze_dim)

    return rotate


full = _rotation(_first_half)
partial = _rotation(_first_half, whole=False)
sign_flipped = _rotation(_first_half, backwards=True)
half_width = _rotation(lambda angles: angles)
pairwise = _rotation(_every_other, neighbours=True)
pairwise_partial = _rotation(_every_other, neighbours=True, whole=False)
interleaved = _rotation(_first_half, neighbours=True)
interleaved_partial = _rotation(_first_half, neighbours=True, whole=False)


def single(x: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Tensor:
    """:func:`full` of one tensor (Gemma 4)."""
    angles = _Angles(_first_half(cos), _first_half(sin), neighbours=False, backwards=False, whole=True)
    return angles.turn(x, unsqueeze_dim)


class _Angles:
    """``cos`` and ``sin`` ``[B or 1, S, P]`` as QuACK's tables ``[B * S, P]``, with each sequence's offset."""

    def __init__(self, cos: Tensor, sin: Tensor, neighbours: bool, backwards: bool, whole: bool) -> None:
        batch, length, self.pairs = cos.shape
        self.filling = -self.pairs % _PAIRS
        # A copy that alignment requires is made here, once: q, k and both backward calls share the table.
        tables = (angles.detach().reshape(batch * length, self.pairs) for angles in (cos, sin))
        self.cos, self.sin = (readable(F.pad(table, (0, self.filling)) if self.filling else table) for table in tables)
        # [B]: the table row of each sequence's first position. None if all sequences share one table.
        self.starts = length * torch.arange(batch, dtype=torch.int32, device=cos.device) if batch > 1 else None
        self.neighbours, self.backwards, self.whole = neighbours, backwards, whole

    def turn(self, x: Tensor, unsqueeze_dim: int) -> Tensor:
        """``x`` rotated, in the layout that ``unsqueeze_dim`` states."""
        width, turned = x.shape[-1], 2 * self.pairs
        if width > _WIDEST_HEAD:
            raise ValueError(
                f"quack needs heads of at most {_WIDEST_HEAD} dimensions, this head has {width}. Choose another "
                "rotary_pos_emb kernel."
            )
        if self.whole and turned != width:
            raise ValueError(f"cos covers {turned} of a head's {width} dimensions; this variant rotates all of them")
        if unsqueeze_dim not in (1, 2):
            raise ValueError(f"unsqueeze_dim is {unsqueeze_dim}, expected 1 or 2")
        if not x.numel():  # QuACK refuses a table without positions
            return x.clone()
        if self.filling or width % _UNIT:
            return torch.cat((self._filled(x[..., :turned], unsqueeze_dim), x[..., turned:]), dim=-1)
        return self._turn(x, unsqueeze_dim)

    def _filled(self, x: Tensor, unsqueeze_dim: int) -> Tensor:
        """``x``, all of which is rotated, with pairs of zeros beside its own."""
        if self.neighbours:
            return self._turn(F.pad(x, (0, 2 * self.filling)), unsqueeze_dim)[..., : x.shape[-1]]
        halves = F.pad(x.unflatten(-1, (2, self.pairs)), (0, self.filling)).flatten(-2)
        return self._turn(halves, unsqueeze_dim).unflatten(-1, (2, -1))[..., : self.pairs].flatten(-2)

    def _turn(self, x: Tensor, unsqueeze_dim: int) -> Tensor:
        heads_first = unsqueeze_dim == 1
        # QuACK reads [B, S, H, D]; the transpose is a view.
        by_position = x.transpose(1, 2) if heads_first else x
        result: Tensor = _Turn.apply(by_position, self.cos, self.sin, self.starts, self.neighbours, self.backwards)
        return result.transpose(1, 2) if heads_first else result


def _turned(x: Tensor, cos: Tensor, sin: Tensor, starts: Tensor | None, neighbours: bool, backwards: bool) -> Tensor:
    if x.shape[0] > _MOST_SEQUENCES:
        whole = torch.empty_like(readable(x))
        for first in range(0, len(x), _MOST_SEQUENCES):
            part = slice(first, first + _MOST_SEQUENCES)
            whole[part] = _turned(x[part], cos, sin, None if starts is None else starts[part], neighbours, backwards)
        return whole
    result: Tensor = apply_rotary(
        readable(x),
        readable(cos),
        readable(sin),
        seqlen_offsets=starts,
        interleaved=neighbours,
        conjugate=backwards,
    )
    return result


def _fake_turned(x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(readable(x))


_turn = operator(
    "veomni_quack::rotary_pos_emb(Tensor x, Tensor cos, Tensor sin, Tensor? starts, bool neighbours, bool backwards)"
    " -> Tensor",
    _turned,
    _fake_turned,
)


class _Turn(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, starts: Tensor | None, neighbours: bool, backwards: bool
    ) -> Tensor:
        ctx.save_for_backward(cos, sin, starts)
        ctx.neighbours, ctx.backwards = neighbours, backwards
        return _turn(x, cos, sin, starts, neighbours, backwards)

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, dresult: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin, starts = ctx.saved_tensors
        # The transpose of a rotation is the rotation by the negative angle.
        gradient = _turn(dresult, cos, sin, starts, ctx.neighbours, not ctx.backwards)
        return gradient, None, None, None, None, None
