"""Checks that a row's result does not depend on what else is in its batch, for kernels that promise it.

Reinforcement learning compares the probabilities of one sequence in two batches, and evaluation repeats a prompt beside
others. A kernel that splits its sums by the size of the batch rounds a row differently in each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from veomni_conformance.comparison import same
from veomni_conformance.sample_rows import count_rows, select_rows
from veomni_conformance.sample_tensors import copy_of, map_tensors
from veomni_conformance.situations import first_of, reveal
from veomni_conformance.subject import Position, Subject
from veomni_ops.contract import Alike, Sample, none_alike

_FEW = 3  # rows that are computed alone
_MANY = 512  # rows, of a sample whose elements are so many times no more than:
_ELEMENTS = 2**21
_OTHER_BITS = "promises batch invariance, but rows have other bits than in their batch"


def check_batch_invariance(subject: Subject, position: Position) -> Iterator[str]:
    """Compute rows alone, in other orders and batches, beside other rows, and in other layouts: with the same bits."""
    if not subject.spec.batch_invariant:
        return
    if not subject.contract.rows and subject.contract.alike is none_alike:
        yield "promises batch invariance, which its op's contract cannot check: it names no inputs with rows"
        return
    yield from first_of(
        sentence for words, problem in _questions(subject, position) for sentence in reveal(words, problem)
    )


def _questions(subject: Subject, position: Position) -> Iterator[tuple[str, Callable[[], str | None]]]:
    sample = subject.sample(position)
    inputs = subject.inputs(sample)
    count = count_rows(subject.contract.rows, inputs)
    if count:
        batches: list[tuple[str, Sequence[int]]] = [
            (f"where row {row} is alone", [row]) for row in range(min(count, _FEW))
        ]
        batches += [
            ("where the first two rows are alone", range(min(count, 2))),
            ("where its rows are in reverse", range(count)[::-1]),
            ("where each row occurs eleven times", [row for row in range(count) for _ in range(11)]),
        ]
        if sum(each.numel() for each in inputs.values()) // count * _MANY <= _ELEMENTS:
            batches.append((f"where {_MANY} rows are a batch", [row % count for row in range(_MANY)]))
        for words, chosen in batches:
            yield words, partial(_differing, subject, position, chosen)
        for row in {0, count - 1} if count > 1 else ():
            yield f"where all rows but row {row} have other values", partial(_beside_others, subject, position, row)
    for alike in subject.contract.alike(sample, subject.spec.features):
        yield alike.words, partial(_of_two_calls, subject, alike)


def _differing(subject: Subject, position: Position, chosen: Sequence[int]) -> str | None:
    sample = subject.draw(position)
    some = select_rows(subject.contract.rows, subject.inputs(sample), sample, chosen)
    pairs = zip(_results(subject, sample), _results(subject, some), strict=True)
    return None if all(same(batch[list(chosen)], rows) for batch, rows in pairs) else _OTHER_BITS


def _beside_others(subject: Subject, position: Position, row: int) -> str | None:
    """Compare one row with the same beside other values of the same shapes."""
    sample, other = subject.draw(position), subject.draw(position, other=True)
    names = {id(tensor): name for name, tensor in subject.inputs(sample).items()}
    others, count = subject.inputs(other), count_rows(subject.contract.rows, subject.inputs(sample))

    def beside(tensor: Tensor) -> Tensor:
        name = names[id(tensor)]
        fresh = others.get(name)
        if name not in subject.contract.rows or fresh is None or tensor.shape != fresh.shape or len(tensor) != count:
            return tensor
        mixed = fresh.detach().clone()
        mixed[row] = tensor.detach()[row]
        return mixed

    pairs = zip(_results(subject, sample), _results(subject, map_tensors(sample, beside)), strict=True)
    return None if all(same(batch[row], mixed[row]) for batch, mixed in pairs) else _OTHER_BITS


def _of_two_calls(subject: Subject, alike: Alike) -> str | None:
    first, then = alike.calls
    results = _results(subject, copy_of(first))
    second = _results(subject, copy_of(then if isinstance(then, Sample) else then(results)))
    one, other = (part(each[0]) for part, each in zip(alike.parts, (results, second), strict=True))
    return None if same(one, other) else _OTHER_BITS


def _results(subject: Subject, sample: Sample) -> tuple[Tensor, ...]:
    with torch.no_grad():
        return subject.call(sample)
