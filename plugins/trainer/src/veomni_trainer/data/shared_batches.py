"""The order of training sequences when several processes share each sequence."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import Sampler


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
