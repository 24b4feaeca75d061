"""Rotations of pairs of a head's dimensions, and the layouts of the pairs' angles in ``cos`` and ``sin``."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

import torch
from torch import Tensor

from veomni_core.ops.contract import Tolerance

Turn = Callable[[Tensor], Tensor]

VALUES = {
    "float32": Tolerance(element=2e-6, norm=5e-7),
    "bfloat16": Tolerance(element=1.6e-2, norm=4e-3),
    "float16": Tolerance(element=2e-3, norm=5e-4),
}


class AngleLayout(Enum):
    """The layout of ``cos`` and ``sin`` that kernels of a variant may assume, and that a site's inputs must have."""

    HALVES = "both halves the same"
    NEIGHBOURS = "each entry twice, side by side"
    ONCE = "each entry once"
    UNRELATED = "halves that may differ"

    def spread(self, angles: Tensor) -> Tensor:
        """Expand ``angles[..., R/2]``, one per pair, to this layout."""
        if self is AngleLayout.NEIGHBOURS:
            return angles.repeat_interleave(2, dim=-1)
        others = {AngleLayout.HALVES: (angles,), AngleLayout.ONCE: (), AngleLayout.UNRELATED: (angles + 1,)}
        return torch.cat((angles, *others[self]), dim=-1)

    def holds(self, cos: Tensor) -> bool:
        """Whether ``cos`` has this layout."""
        if self is AngleLayout.HALVES:
            first, second = cos.chunk(2, dim=-1)
            return torch.equal(first, second)
        return self is not AngleLayout.NEIGHBOURS or torch.equal(cos[..., ::2], cos[..., 1::2])


def rotate_half(x: Tensor) -> Tensor:
    """Rotate each pair ``(i, i + D/2)`` by 90 degrees."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def rotate_pairs(x: Tensor) -> Tensor:
    """Rotate each pair of neighbours ``(2i, 2i + 1)`` by 90 degrees."""
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


def turned(x: Tensor, cos: Tensor, sin: Tensor, turn: Turn = rotate_half) -> Tensor:
    """Rotate ``x``; ``cos`` and ``sin`` broadcast against it and get no gradient. The result has x's dtype."""
    return (x * cos.detach() + turn(x) * sin.detach()).to(x.dtype)
