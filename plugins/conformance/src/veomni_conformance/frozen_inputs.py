"""Checks that gradients are right whichever inputs are frozen.

Adapters (LoRA) freeze the weights, the first layer's input requires no gradient, and in a frozen vision tower nothing
does.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from veomni_conformance.process_state import listed
from veomni_conformance.situations import first_of, reveal
from veomni_conformance.subject import Outcome, Position, Subject

# Up to this many inputs, every subset is frozen. With more, each one alone, all but each one, and all.
_ALL_SUBSETS = 6


def check_frozen_inputs(subject: Subject, position: Position, all_subsets: int = _ALL_SUBSETS) -> Iterator[str]:
    """Freeze every subset of up to ``all_subsets`` inputs; then, with none frozen, compute each gradient alone."""
    names = tuple(subject.differentiable(subject.sample(position)))
    yield from first_of(
        sentence
        for frozen in _subsets(names, all_subsets)
        for sentence in reveal(f"with {listed(frozen)} frozen", lambda f=frozen: _freeze(subject, position, f))  # type: ignore[misc]
    )
    if subject.spec.backward and len(names) > 1:
        yield from first_of(
            sentence
            for name in names
            for sentence in reveal(
                f"where the gradient of {name} alone is asked for",
                lambda n=name: _alone(subject, position, n),  # type: ignore[misc]
            )
        )


def _subsets(names: tuple[str, ...], all_subsets: int) -> Iterator[tuple[str, ...]]:
    counts = range(1, len(names) + 1) if len(names) <= all_subsets else {1, len(names) - 1, len(names)}
    for count in counts:
        yield from combinations(names, count)


def _freeze(subject: Subject, position: Position, frozen: tuple[str, ...]) -> str | None:
    sample = subject.draw(position)
    inputs = subject.inputs(sample)
    for name in frozen:
        inputs[name].requires_grad_(False)
    results = subject.call(sample)
    if not subject.differentiable(sample) and any(result.requires_grad for result in results):
        return "its result requires a gradient although no input does"
    gradients = subject.gradients(results, sample) if subject.spec.backward else {}
    if any(inputs[name].grad is not None for name in inputs):
        return "it writes a `.grad` itself"
    return subject.problem(Outcome(tuple(result.detach() for result in results), gradients), subject.exact(position))


def _alone(subject: Subject, position: Position, name: str) -> str | None:
    sample = subject.draw(position)
    results = subject.call(sample)
    gradients = subject.gradients(results, sample, only=(name,))
    return subject.problem(Outcome(tuple(result.detach() for result in results), gradients), subject.exact(position))
