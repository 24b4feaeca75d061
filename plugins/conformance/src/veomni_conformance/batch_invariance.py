"""Checks that a row's result does not depend on the other rows of its batch, for kernels that promise it.

Reinforcement learning compares the probabilities of one sequence in two batches, and evaluation repeats a prompt beside
others. A kernel that splits its sums by the size of the batch rounds a row differently in each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from veomni_conformance.comparison import same
from veomni_conformance.sample_rows import count_rows, select_rows
from veomni_conformance.situations import first_of, reveal
from veomni_conformance.subject import Position, Subject

_FEW = 3  # rows that are computed alone


def check_batch_invariance(subject: Subject, position: Position) -> Iterator[str]:
    """Compute rows alone, in other orders, and in larger batches: each has the same bits as in the sample."""
    if not subject.spec.batch_invariant:
        return
    if not subject.contract.rows:
        yield "promises batch invariance, which its op's contract cannot check: it names no inputs with rows"
        return
    count = count_rows(subject.contract.rows, subject.inputs(subject.sample(position)))
    if not count:
        return
    batches: list[tuple[str, Sequence[int]]] = [(f"where row {row} is alone", [row]) for row in range(min(count, _FEW))]
    batches += [
        ("where its rows are in reverse", range(count)[::-1]),
        ("where each row occurs eleven times", [row for row in range(count) for _ in range(11)]),
    ]
    yield from first_of(
        sentence
        for words, chosen in batches
        for sentence in reveal(words, lambda c=chosen: _differing(subject, position, c))  # type: ignore[misc]
    )


def _differing(subject: Subject, position: Position, chosen: Sequence[int]) -> str | None:
    whole, part = _rows(subject, position, None), _rows(subject, position, chosen)
    for batch, rows in zip(whole, part, strict=True):
        if not same(batch[list(chosen)], rows):
            return "promises batch invariance, but rows have other bits than in their batch"
    return None


def _rows(subject: Subject, position: Position, chosen: Sequence[int] | None) -> tuple[Tensor, ...]:
    sample = subject.draw(position)
    if chosen is not None:
        sample = select_rows(subject.contract.rows, subject.inputs(sample), sample, chosen)
    with torch.no_grad():
        return subject.call(sample)
