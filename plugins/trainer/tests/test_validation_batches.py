"""Validation sequences as they are dealt out to groups of processes."""

from __future__ import annotations

from collections import Counter

import pytest

from veomni_trainer.data.orders import validation_batches


@pytest.mark.parametrize("sequences", [1, 2, 5, 8, 9])
@pytest.mark.parametrize("groups", [1, 2, 3, 8])
@pytest.mark.parametrize("batch_size", [1, 2, 4, 16])
def test_each_sequence_counts_once_and_all_groups_take_part_alike(sequences: int, groups: int, batch_size: int) -> None:
    dealt = [list(validation_batches(sequences, batch_size, groups, group)) for group in range(groups)]
    assert len({len(batches) for batches in dealt}) == 1
    counted = Counter(index for batches in dealt for batch in batches if batch.weight for index in batch.indices)
    assert counted == Counter(range(sequences))
    for batch in (batch for batches in dealt for batch in batches):
        assert batch.weight in (0, len(batch.indices))
        assert 0 < len(batch.indices) <= batch_size
