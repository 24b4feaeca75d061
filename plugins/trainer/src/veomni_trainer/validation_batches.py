"""How the validation sequences are dealt out to the processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class ValidationBatch:
    """Some of the sequences, and how many of them count."""

    indices: range
    weight: int


def validation_batches(sequences: int, batch_size: int, groups: int, group: int) -> Iterator[ValidationBatch]:
    """The batches of ``group`` among ``groups`` of processes; together they hold each sequence once, by weight.

    All groups get equally many, as processes that shard a model need each other in every forward. One for which no
    sequences are left computes the first batch once more, with no weight.
    """
    batches = [range(start, min(start + batch_size, sequences)) for start in range(0, sequences, batch_size)]
    for first in range(0, len(batches), groups):
        index = first + group
        if index < len(batches):
            yield ValidationBatch(batches[index], len(batches[index]))
        else:
            yield ValidationBatch(batches[0], 0)
