"""Rotations of pairs of a head's dimensions, and the layouts of the pairs' angles in ``cos`` and ``sin``."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

import torch
from torch import Tensor

from veomni_ops.contract import tolerances

Turn = Callable[[Tensor], Tensor]

VALUES = tolerances(float32=(2e-6, 5e-7), bfloat16=(1.6e-2, 4e-3), float16=(2e-3, 5e-4))


class AngleLayout(Enum):
    """The layout of ``cos`` and ``sin`` that kernels of a variant may assume, and that a site's inputs must have.

    Example:
        >>> angles = torch.tensor([0.1, 0.2])  # of two pairs
        >>> AngleLayout.HALVES.spread(angles)
        tensor([0.1000, 0.2000, 0.1000, 0.2000])
        >>> AngleLayout.NEIGHBOURS.spread(angles)
        tensor([0.1000, 0.1000, 0.2000, 0.2000])
        >>> AngleLayout.NEIGHBOURS.holds(AngleLayout.HALVES.spread(angles))
        False
    """

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


def angles_between(cos: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines like ``cos`` in float32, all of which ``dtype`` rounds down: a kernel that does so is biased.

    Example:
        >>> cos, sin = angles_between(torch.zeros(1), torch.bfloat16)
        >>> cos, cos.bfloat16()
        (tensor([0.7518]), tensor([0.7500], dtype=torch.bfloat16))
    """
    step = 0.45 * torch.finfo(dtype).eps / 2
    wide = cos.float()
    return torch.full_like(wide, 0.75 + step), torch.full_like(wide, 0.625 + step)


def rotate_half(x: Tensor) -> Tensor:
    """Rotate each pair ``(i, i + D/2)`` by 90 degrees.

    Args:
        x: ``[..., D]`` with an even D.

    Returns:
        ``[..., D]`` in x's dtype.

    Example:
        >>> rotate_half(torch.tensor([1, 2, 30, 40]))
        tensor([-30, -40,   1,   2])
    """
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def rotate_pairs(x: Tensor) -> Tensor:
    """Rotate each pair of neighbours ``(2i, 2i + 1)`` by 90 degrees.

    Args:
        x: ``[..., D]`` with an even D.

    Returns:
        ``[..., D]`` in x's dtype.

    Example:
        >>> rotate_pairs(torch.tensor([1, 2, 30, 40]))
        tensor([ -2,   1, -40,  30])
    """
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


def turned(x: Tensor, cos: Tensor, sin: Tensor, turn: Turn = rotate_half) -> Tensor:
    """Rotate pairs of ``x``'s last dimension. ``cos`` and ``sin`` get no gradient.

    Args:
        x: ``[..., D]``.
        cos, sin: cosines and sines of the pairs' angles, of a shape that broadcasts to x's.
        turn: rotates each pair by 90 degrees, and so says which elements are a pair.

    Returns:
        ``[..., D]`` in x's dtype.

    Example:
        >>> x = torch.tensor([1.0, 2.0, 30.0, 40.0])
        >>> cos, sin = torch.tensor([0.0, 1.0, 0.0, 1.0]), torch.tensor([1.0, 0.0, 1.0, 0.0])
        >>> turned(x, cos, sin)  # the first pair by 90 degrees, the second not at all
        tensor([-30.,   2.,   1.,  40.])
    """
    return (x * cos.detach() + turn(x) * sin.detach()).to(x.dtype)
