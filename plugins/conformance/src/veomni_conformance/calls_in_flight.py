"""Checks that calls don't interfere with each other between forward and backward.

A model calls a kernel once per layer before any backward runs; gradient accumulation and pipelines interleave calls in
other orders too. In between run a teacher's forwards without gradients, and forwards whose graph is dropped. FSDP frees
a layer's weights after its forward, and gathers them elsewhere before its backward. If the next layer or an optimizer
writes in place into a tensor that backward needs, the gradients must stay right or an error must be raised.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from veomni_conformance.sample_tensors import upstream_of
from veomni_conformance.situations import first_of, reveal
from veomni_conformance.subject import Outcome, Position, Subject
from veomni_ops.contract import Sample

_LAYERS = 70  # more than the 64 workspaces of a ring
_TRIES = 16  # to get other memory than what was freed
_ELSEWHERE = 77  # each byte of memory that is none of a call's
# A call whose backward has not run: its position, whether it has the other values, its sample, its results.
_Call = tuple[Position, bool, Sample, tuple[Tensor, ...]]


def check_calls_in_flight(subject: Subject, position: Position, neighbour: Position) -> Iterator[str]:
    """Run forwards of ``position`` with two sets of values, and of ``neighbour``, before any of their backwards."""
    orders = [(", in that order", False), (", in the other order", True)] if subject.spec.backward else [("", False)]
    yield from first_of(
        sentence
        for words, reverse in orders
        for sentence in reveal(
            f"where several forwards run before their backwards{words}",
            lambda r=reverse: _several(subject, position, neighbour, r),  # type: ignore[misc]
        )
    )
    if not subject.spec.backward:
        return
    yield from reveal(
        "where the next layer writes into its result before backward",
        lambda: _result_overwritten(subject, position),
        may_refuse=True,
    )
    yield from first_of(
        sentence
        for name in subject.inputs(subject.sample(position))
        for sentence in reveal(
            f"where {name} is written in place between forward and backward, and nothing is raised",
            lambda n=name: _input_overwritten(subject, position, n),  # type: ignore[misc]
            may_refuse=True,
        )
    )


def check_many_layers(subject: Subject, position: Position) -> Iterator[str]:
    """Run many forwards before the first one's backward; and free its inputs in between, as FSDP frees weights."""
    if subject.spec.backward:
        words = f"where {_LAYERS} more forwards run before its backward"
        yield from reveal(words, lambda: _first_of_many(subject, position))
        words = "where its inputs' memory is freed after forward, and they have other memory in backward"
        yield from reveal(words, lambda: _gathered_again(subject, position))


def _first_of_many(subject: Subject, position: Position) -> str | None:
    sample = subject.draw(position)
    kept = [subject.call(sample), *(subject.call(subject.draw(position, other=True)) for _ in range(_LAYERS))]
    return _gradients_are_right(subject, position, kept[0], sample)


def _gathered_again(subject: Subject, position: Position) -> str | None:
    sample = subject.draw(position)
    results = subject.call(sample)
    storages = [each.untyped_storage() for each in subject.differentiable(sample).values()]
    memories = {each.data_ptr(): each for each in storages if each.resizable()}  # our simulated NPU's are not
    taken = []  # serves something else meanwhile, and is freed with the call's end
    for memory in memories.values():
        value, former = memory.clone(), memory.data_ptr()
        memory.fill_(_ELSEWHERE)  # type: ignore[attr-defined]
        for _ in range(_TRIES):
            memory.resize_(0)
            taken.append(value.clone().fill_(_ELSEWHERE))
            memory.resize_(value.nbytes())
            if memory.data_ptr() != former:
                break
        memory.copy_(value)
    return _gradients_are_right(subject, position, results, sample)


def _gradients_are_right(
    subject: Subject, position: Position, results: tuple[Tensor, ...], sample: Sample
) -> str | None:
    gradients = subject.gradients(results, sample)
    return subject.problem(Outcome((), gradients), Outcome((), subject.exact(position).gradients))


def _several(subject: Subject, position: Position, neighbour: Position, reverse: bool) -> str | None:
    wanted = [(position, False), (position, True), (neighbour, False), (position, False)]
    calls: list[_Call] = []
    for each, other in wanted:
        sample = subject.draw(each, other)
        calls.append((each, other, sample, subject.call(sample)))
        if reverse:  # a forward without gradients, as a teacher's, and one whose graph is dropped
            with torch.no_grad():
                subject.call(subject.draw(each, not other))
            subject.call(subject.draw(each, not other))
    held = [(call, Outcome(tuple(result.detach() for result in call[3]))) for call in calls]
    found: list[tuple[_Call, Outcome]] = []
    for call in reversed(calls) if reverse else calls:
        gradients = subject.gradients(call[3], call[2]) if subject.spec.backward else {}
        found.append((call, Outcome(tuple(result.detach() for result in call[3]), gradients)))
    # Compared only at the end, when a later call may have overwritten something.
    for (each, other, *_), outcome in [*held, *found]:
        if problem := subject.problem(outcome, subject.exact(each, other)):
            return problem
    return None


def _result_overwritten(subject: Subject, position: Position) -> str | None:
    sample = subject.draw(position)
    doubled = tuple(result.mul_(2.0) if result.requires_grad else result for result in subject.call(sample))
    gradients = subject.gradients(doubled, sample, lambda result: upstream_of(result) / 2)
    return subject.problem(Outcome((), gradients), Outcome((), subject.exact(position).gradients))


def _input_overwritten(subject: Subject, position: Position, name: str) -> str | None:
    sample = subject.draw(position)
    results = subject.call(sample)
    tensor, replacement = subject.inputs(sample)[name], subject.inputs(subject.draw(position, other=True))[name]
    kept: Any = tensor.detach().clone()
    with torch.no_grad():
        tensor.copy_(replacement)
    problem = _gradients_are_right(subject, position, results, sample)
    return None if torch.equal(kept, replacement) else problem
