"""Searches for what makes two runs differ, by runs in which only some parts are on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

Part = TypeVar("Part")
Differs = Callable[[tuple[Part, ...]], bool]


def causes(parts: Sequence[Part], differs: Differs[Part]) -> list[tuple[Part, ...]]:
    """Smallest groups of ``parts`` that make a run differ, if all of them together do.

    A part that makes it differ by itself is a group of one, and each such part is found. Where none does in a half and
    in the other half, the parts of one group that do so only together are found.

    Args:
        parts: what can be on, in an order in which neighbours are alike.
        differs: whether a run with only these parts on differs. ``differs(parts)`` must hold. About
            ``2 n log2(len(parts))`` runs are made for n causes.

    Example:
        >>> causes(range(100), lambda on: 7 in on or 93 in on)
        [(7,), (93,)]
        >>> causes(range(100), lambda on: {7, 93} <= {*on})
        [(7, 93)]
    """
    if len(parts) == 1:
        return [tuple(parts)]
    found = [cause for half in _halves(parts) if differs(half) for cause in causes(half, differs)]
    return found or [together(parts, (), differs)]


def together(parts: Sequence[Part], on: tuple[Part, ...], differs: Differs[Part]) -> tuple[Part, ...]:
    """A smallest group of ``parts`` that makes a run differ in which ``on`` are on too, if all ``parts`` do.

    This is Zeller's delta debugging: where neither half suffices, the parts of each are found with the other one on.
    """
    if len(parts) == 1:
        return tuple(parts)
    first, second = _halves(parts)
    for half in (first, second):
        if differs((*on, *half)):
            return together(half, on, differs)
    return (*together(first, (*on, *second), differs), *together(second, (*on, *first), differs))


def _halves(parts: Sequence[Part]) -> tuple[tuple[Part, ...], tuple[Part, ...]]:
    middle = (len(parts) + 1) // 2
    return tuple(parts[:middle]), tuple(parts[middle:])
