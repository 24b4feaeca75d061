"""Packs documents into sequences of one length: best fit, the longest documents first, in windows of many documents.

TRL's ``pack_dataset`` makes tables of tokens of them; here they stay where they are stored, and indices are packed.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]

_WINDOW = 2**14  # so many pieces are sorted together: more would fill little better, and put equal lengths side by side


@dataclass(frozen=True)
class Pieces:
    """Parts of documents that fit into a sequence: ``starts[pieces]`` in the tokens, and ``lengths[pieces]``."""

    starts: Indices
    lengths: Indices

    @classmethod
    def of(cls, starts: Indices, ends: Indices, capacity: int, *, split: bool) -> Pieces:
        """Each document as one piece. Of a longer one ``split`` makes several; otherwise it is cut off."""
        lengths = ends - starts
        if not split:
            return cls(starts, np.minimum(lengths, capacity))
        counts = -(-lengths // capacity)
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        offsets = within * capacity
        return cls(np.repeat(starts, counts) + offsets, np.minimum(np.repeat(lengths, counts) - offsets, capacity))


@dataclass(frozen=True)
class Packs:
    """Which pieces are in which sequence: those of sequence ``i`` are ``order[ends[i - 1] : ends[i]]``."""

    order: Indices
    ends: Indices

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> Indices:
        return self.order[self.ends[index - 1] if index else 0 : self.ends[index]]

    def sums(self, values: Indices) -> Indices:
        """``[sequences]``: the sum over each one's pieces of ``values[pieces]``."""
        totals = np.concatenate([np.zeros(1, np.int64), np.cumsum(values[self.order])])
        return np.diff(totals[self.ends], prepend=0)


def pack(lengths: Indices, capacity: int, seed: int) -> Packs:
    """Put pieces of ``lengths[pieces]``, none above ``capacity``, into as few sequences as best fit finds.

    Pieces are shuffled by ``seed``, taken window by window, and sorted in a window; the result depends on nothing else.
    """
    shuffled = np.random.default_rng(seed).permutation(len(lengths))
    packs = [
        pieces
        for start in range(0, len(shuffled), _WINDOW)
        for pieces in _best_fit(shuffled[start : start + _WINDOW], lengths, capacity)
    ]
    order = np.fromiter((piece for pieces in packs for piece in pieces), np.int64, len(shuffled))
    return Packs(order, np.cumsum([len(pieces) for pieces in packs], dtype=np.int64))


def _best_fit(window: Indices, lengths: Indices, capacity: int) -> list[list[int]]:
    packs: list[list[int]] = []
    open_packs: dict[int, list[int]] = {}  # by the space that is left
    spaces: list[int] = []  # the keys of open_packs, sorted
    for piece in window[np.argsort(-lengths[window], kind="stable")].tolist():
        length = int(lengths[piece])
        at = bisect_left(spaces, length)
        if at < len(spaces):
            space = spaces[at]
            number = open_packs[space].pop()
            if not open_packs[space]:
                del open_packs[space], spaces[at]
        else:
            space, number = capacity, len(packs)
            packs.append([])
        packs[number].append(piece)
        if left := space - length:
            if left not in open_packs:
                open_packs[left] = []
                insort(spaces, left)
            open_packs[left].append(number)
    return packs
