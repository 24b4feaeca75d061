"""Distributes the validation sequences over the processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


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
