"""Values of tensors of millions of elements: other at each place, the same in every process, and as a sample's are."""

from __future__ import annotations

import torch

from veomni_conformance.sample_tensors import upstream_of
from veomni_ops.contract import Draw, other_values
from veomni_ops.many_values import MANY, spread, table

CPU = torch.device("cpu")
WIDTH = 2048


def _rows(seed=0):
    return Draw(CPU, torch.float32, seed).normal(MANY // WIDTH + 1, WIDTH, scale=2.0, shift=1.0)


def test_many_values_are_normal_seeded_and_of_other_values_where_a_sample_wants_them():
    rows = _rows()
    assert abs(float(rows.mean()) - 1.0) < 0.01 and abs(float(rows.std()) - 2.0) < 0.01
    assert torch.equal(rows, _rows()) and not torch.equal(rows, _rows(seed=1))
    with other_values():
        assert not torch.equal(rows, _rows())


def test_two_draws_in_turn_have_nothing_in_common():
    draw = Draw(CPU, torch.float32)
    first, second = draw.normal(MANY + 1), draw.normal(MANY + 1)
    assert float((first * second).mean().abs()) < 0.01


def test_no_row_is_like_another_however_far_away():
    """A kernel that reads the row before, or the one a tile further, must give another result."""
    rows = _rows()
    for distance in (1, 2, 16, 64, 128, 512, 1024):
        same = (rows[distance:] == rows[:-distance]).double().mean()
        assert float(same) < 1e-4, distance


def test_up_to_four_million_values_are_what_they_were():
    generator = torch.Generator().manual_seed(0)
    wanted = torch.randn(1000, 4096, generator=generator, dtype=torch.float64).float()
    assert torch.equal(Draw(CPU, torch.float32).normal(1000, 4096), wanted)


def test_chunks_and_seeds():
    numbers = table(torch.Generator().manual_seed(0))
    whole = spread(numbers, (3, 1 << 20))
    assert torch.equal(whole[0], spread(numbers, (1 << 20,))) and not torch.equal(whole[0], whole[2])
    assert not torch.equal(whole, spread(numbers, (3, 1 << 20), seed=1))


def test_upstream_gradients_of_every_size_are_the_same_in_each_dtype():
    for shape in ((3, 5), (1 << 10, 100), (MANY // WIDTH + 1, WIDTH)):
        sent = [upstream_of(torch.empty(shape, dtype=dtype)) for dtype in (torch.float64, torch.bfloat16)]
        assert torch.equal(sent[0], sent[1].double()) and sent[1].dtype == torch.bfloat16
        sent[1].zero_()  # what a kernel does to its own is its own
        assert torch.equal(upstream_of(torch.empty(shape, dtype=torch.float64)), sent[0])
