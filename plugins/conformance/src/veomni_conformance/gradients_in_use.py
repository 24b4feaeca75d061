"""Checks gradients in every way in which autograd may be used.

``backward()`` adds to ``.grad``; ``autograd.grad`` leaves ``.grad`` alone; ``retain_graph=True`` allows a second
backward; a model may use only one of several results; and inputs usually are results of other layers, not leaves.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from veomni_conformance.sample_tensors import map_tensors
from veomni_conformance.situations import first_of, reveal
from veomni_conformance.subject import Outcome, Position, Subject
from veomni_conformance.values import first_damage


def check_gradients_in_use(subject: Subject, position: Position) -> Iterator[str]:
    """Compute gradients in each of these ways, and compare them with the oracle's."""
    if not subject.spec.backward or not subject.differentiable(subject.sample(position)):
        return
    if subject.draws_parameters:
        yield from reveal("where its inputs are parameters", lambda: subject.plain_problem(position))
    yield from reveal("where `.grad` holds something and autograd.grad is asked", lambda: _untouched(subject, position))
    yield from reveal("where backward() runs in two steps", lambda: _accumulated(subject, position))
    yield from reveal("in a second backward of one graph", lambda: _twice(subject, position))
    yield from reveal("where its inputs are other layers' results", lambda: _not_leaves(subject, position))
    if subject.draws_parameters:
        words = "where its first input is another layer's result, and the others are parameters"
        yield from reveal(words, lambda: _not_leaves(subject, position, count=1))
    count = len(subject.exact(position).results)
    if count > 1:
        yield from first_of(
            sentence
            for used in range(count)
            for sentence in reveal(
                f"where only result {used} is used",
                lambda u=used: _one_result(subject, position, u),  # type: ignore[misc]
            )
        )


def _untouched(subject: Subject, position: Position) -> str | None:
    sample = subject.draw(position)
    leaves = subject.differentiable(sample)
    held = {name: torch.full_like(leaf, 0.5) for name, leaf in leaves.items()}
    for name, leaf in leaves.items():
        leaf.grad = held[name]
    problem = subject.problem(subject.outcome(sample), subject.exact(position))
    for name, leaf in leaves.items():
        if leaf.grad is not held[name] or not bool((held[name] == 0.5).all()):
            return f"it writes into the `.grad` of {name}"
    return problem


def _accumulated(subject: Subject, position: Position) -> str | None:
    sample = subject.draw(position)
    leaves = subject.differentiable(sample)
    for step in (1, 2):
        results = subject.call(sample)
        reached = [result for result in results if result.requires_grad]
        torch.autograd.backward(reached, subject.upstreams(reached, sample))
        sums = {name: None if leaf.grad is None else leaf.grad / step for name, leaf in leaves.items()}
        found = Outcome(tuple(result.detach() for result in results), sums)
        if problem := subject.problem(found, subject.exact(position)):
            return f"{problem} after step {step}"
    return None


def _twice(subject: Subject, position: Position) -> str | None:
    sample = subject.draw(position)
    results = subject.call(sample)
    first = subject.gradients(results, sample, retain_graph=True)
    second = subject.gradients(results, sample)
    exact = Outcome((), subject.exact(position).gradients)
    return subject.problem(Outcome((), second), exact) or subject.problem(Outcome((), first), exact)


def _not_leaves(subject: Subject, position: Position, count: int | None = None) -> str | None:
    """With the first ``count`` inputs that want gradients, or all, as results of an operator."""
    leaves = subject.draw(position)
    given = {id(tensor) for tensor in [*subject.differentiable(leaves).values()][:count]}
    sample = map_tensors(leaves, lambda tensor: tensor.view_as(tensor) if id(tensor) in given else tensor)
    results = subject.call(sample)
    gradients = subject.gradients(results, leaves)
    detached = tuple(result.detach() for result in results)
    written = first_damage(subject, leaves, subject.draw(position), detached)
    return written or subject.problem(Outcome(detached, gradients), subject.exact(position))


def _one_result(subject: Subject, position: Position, used: int) -> str | None:
    def gradients(of_reference: bool) -> dict[str, Tensor | None]:
        sample = subject.exact_sample(position) if of_reference else subject.draw(position)
        results = subject.reference_results(sample) if of_reference else subject.call(sample)
        found = subject.gradients((results[used],), sample)
        # Inputs on which the used result does not depend may have no gradient, or one of zeros.
        inputs = subject.inputs(sample)
        return {name: torch.zeros_like(inputs[name]) if each is None else each for name, each in found.items()}

    return subject.problem(Outcome((), gradients(of_reference=False)), Outcome((), gradients(of_reference=True)))
