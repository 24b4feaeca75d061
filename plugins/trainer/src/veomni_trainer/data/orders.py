"""The order of sequences: drawn from several sources by weight, shared by processes, and spread over them to validate.

``datasets``' ``interleave_datasets`` repeats a source in the order of its first pass, and has no number of draws that
only goes on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from torch.utils.data import Sampler

_BLOCK = 4096  # so many sources are drawn at once


def drawn_sources(weights: Sequence[float], seed: int) -> Iterator[int]:
    """Numbers of sources without an end, each drawn by weight."""
    generator = np.random.default_rng(seed)
    while True:
        yield from generator.choice(len(weights), _BLOCK, p=_shares(weights)).tolist()


def _shares(weights: Sequence[float]) -> Any:
    return np.asarray(weights, np.float64) / sum(weights)


class WeightedOrder(Sampler[int]):
    """The order of ``draws`` sequences: each is of a source that is drawn by weight, and the next one of its shuffle.

    A source of which every sequence was drawn is shuffled anew and starts again. The order depends on sizes, weights
    and seed; with more draws it goes on, and does not change.

    Args:
        sizes: how many sequences each source has; they are counted on from the first source to the last.
        weights: how often each source is drawn, relative to the others.
        draws: how many sequences a training takes.
        seed: of the draws and of the shuffles.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], draws: int, seed: int) -> None:
        self._sizes, self._weights, self._draws, self._seed = sizes, weights, draws, seed

    def __len__(self) -> int:
        return self._draws

    def __iter__(self) -> Iterator[int]:
        first = np.cumsum([0, *self._sizes[:-1]])
        shuffles = [self._shuffles(number) for number in range(len(self._sizes))]
        for source in islice(drawn_sources(self._weights, self._seed), self._draws):
            yield int(first[source]) + next(shuffles[source])

    def passes(self) -> list[float]:
        """How often each source is gone through, on average over all seeds."""
        shares = _shares(self._weights)
        return [self._draws * float(share) / size for share, size in zip(shares, self._sizes, strict=True)]

    def _shuffles(self, source: int) -> Iterator[int]:
        number = 0
        while True:
            yield from np.random.default_rng((self._seed, source, number)).permutation(self._sizes[source]).tolist()
            number += 1


class SharedBatches(Sampler[int]):
    """Repeats every batch ``ranks`` times in a row, in the ``order`` of a single process.

    accelerate distributes batches to processes round-robin, so the ``ranks`` processes of a group get the same batch.
    """

    def __init__(self, order: Any, batch_size: int, ranks: int) -> None:
        self._order, self._batch_size, self._ranks = order, batch_size, ranks

    def __iter__(self) -> Iterator[int]:
        order = iter(self._order)
        while len(batch := list(islice(order, self._batch_size))) == self._batch_size:
            for _ in range(self._ranks):
                yield from batch

    def __len__(self) -> int:
        return len(self._order) // self._batch_size * self._batch_size * self._ranks

    def set_epoch(self, epoch: int) -> None:
        """Reshuffle, depending on seed and epoch, if the order does."""
        if hasattr(self._order, "set_epoch"):
            self._order.set_epoch(epoch)


@dataclass(frozen=True)
class ValidationBatch:
    """Indices of some validation sequences, and the weight of their mean loss: how many of them count."""

    indices: range
    weight: int


def validation_batches(sequences: int, batch_size: int, groups: int, group: int) -> Iterator[ValidationBatch]:
    """The batches of process group number ``group`` out of ``groups``. By weight, each sequence counts once overall.

    All groups get the same number of batches, since processes that shard a model must run every forward together. A
    group without sequences left computes the first batch again, with weight 0.
    """
    batches = [range(start, min(start + batch_size, sequences)) for start in range(0, sequences, batch_size)]
    for first in range(0, len(batches), groups):
        index = first + group
        if index < len(batches):
            yield ValidationBatch(batches[index], len(batches[index]))
        else:
            yield ValidationBatch(batches[0], 0)
