"""The first check: results and gradients of every sample are right, and nothing else is written.

Results and gradients are compared with those of the oracle, the contract's reference on float64 copies. Also checked:
inputs and incoming gradients are not written to; results share no memory with inputs or with each other; no gradient is
missing; dtypes and shapes are the reference's; rounding is too, if the contract bounds it; no result or gradient in 16
bits is too large or too small on average; and two runs give the same bits, if the kernel promises determinism.

The first call of all is made under ``inference_mode``, as by a model that generates before it is trained: it must be
right too, and what a kernel keeps from it must not be a tensor that autograd refuses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from veomni_conformance.comparison import bias, distance, one_line, plain, same, share_memory
from veomni_conformance.report import CaseResult
from veomni_conformance.sample_tensors import upstream_of
from veomni_conformance.situations import reveal
from veomni_conformance.subject import Outcome, Position, Subject, result_name
from veomni_ops.contract import Sample

_OF_NORM = 0.25  # of the norm's tolerance: what may be off in the mean
_OF_SPACING = 0.2  # of the dtype's: cutting bits off instead of rounding is off by a third of it in the mean
_CHANCE = 4.0  # standard deviations of a mean of errors that have no common cause
_FEW = 64  # elements: fewer have no meaningful mean


@dataclass(frozen=True)
class _Run:
    """One call with fresh inputs, its outcome, and the incoming gradients that it got."""

    sample: Sample
    outcome: Outcome
    upstream: tuple[Tensor, ...]


def check_values(subject: Subject, position: Position) -> CaseResult:
    """Check one sample's values. The result has the failures, and the largest errors as shares of the tolerances."""
    name = subject.sample(position).name
    exact = subject.exact(position)
    eager = subject.reference(subject.draw(position))
    run, words, without = _first_run(subject, position)
    failures = [*_form(subject, run, eager)]
    if failures:
        return CaseResult(name, tuple(words + failure for failure in failures))
    failures += _damage(subject, run, subject.draw(position))
    worst_value = worst_gradient = 0.0
    found = run.outcome
    for index, (result, wanted, rounded) in enumerate(zip(found.results, exact.results, eager.results, strict=True)):
        what = result_name(index, len(found.results))
        share, problem = distance(result, wanted, subject.contract.values[subject.dtype_name], what)
        worst_value = max(worst_value, share)
        problem = problem or _rounding(subject, result, rounded, what)
        failures += [problem] if problem else []
    for argument, gradient in found.gradients.items():
        wanted_gradient = exact.gradients[argument]
        if gradient is None:
            failures += [f"the gradient of {argument} is missing"] if wanted_gradient is not None else []
        elif wanted_gradient is not None:
            allowed, what = subject.contract.gradients[subject.dtype_name], f"the gradient of {argument}"
            share, problem = distance(gradient, wanted_gradient, allowed, what)
            worst_gradient = max(worst_gradient, share)
            failures += [problem] if problem else []
    if not failures:
        failures += _mean_errors(subject, position, found, eager)
    if subject.spec.deterministic:
        failures += _differences(found, _run(subject, position, subject.draw(position)).outcome)
    if not failures:
        failures, words = without, ""
    return CaseResult(name, tuple(words + failure for failure in failures), worst_value, worst_gradient)


def _first_run(subject: Subject, position: Position) -> tuple[_Run, str, list[str]]:
    """A run after a call under ``inference_mode`` on the same tensors; how to begin what is wrong about it; and what is
    wrong about the call before.
    """
    sample, words = subject.draw(position), "after a first call under torch.inference_mode(), "
    problem = partial(without_gradients, subject, position)
    usual = ("under torch.no_grad()", partial(problem, torch.no_grad))
    without = [*reveal("under torch.inference_mode()", partial(problem, torch.inference_mode, sample), without=usual)]
    if without:  # which is said of that call, and not of the next
        sample = subject.draw(position)
    try:
        run = _run(subject, position, sample)
    except RuntimeError as error:
        if "nference tensor" not in str(error):
            raise
        raise RuntimeError(f"{words}{one_line(error)}") from error
    if subject.problem(run.outcome, subject.exact(position)) is None:
        return run, "", without
    again = _run(subject, position, subject.draw(position))
    return run, words if subject.problem(again.outcome, subject.exact(position)) is None else "", without


def without_gradients(
    subject: Subject, position: Position, mode: Callable[[], Any], sample: Sample | None = None
) -> str | None:
    """What is wrong with a call in a ``mode`` that records no gradients, on ``sample`` if it is given: a copy."""
    with mode():
        sample = sample or subject.draw(position)
        results = subject.call(sample)
        problem = subject.problem(Outcome(results), subject.exact(position))
        # The result may be right although the kernel wrote into its inputs, so the inputs are compared too.
        return problem or first_damage(subject, sample, subject.draw(position), results)


def _run(subject: Subject, position: Position, sample: Sample) -> _Run:
    sent: list[Tensor] = []

    def remembered(result: Tensor) -> Tensor:
        sent.append(upstream_of(result))
        return sent[-1]

    return _Run(sample, subject.outcome(sample, remembered), tuple(sent))


def _form(subject: Subject, run: _Run, eager: Outcome) -> Iterator[str]:
    results = run.outcome.results
    if len(results) != len(eager.results):
        yield f"gives {len(results)} tensors, expected {len(eager.results)}"
        return
    for result, expected in zip(results, eager.results, strict=True):
        for aspect in ("dtype", "shape", "device"):
            has, wanted = getattr(result, aspect), getattr(expected, aspect)
            if has != wanted:
                yield f"gives {aspect} {plain(has)}, expected {plain(wanted)}"
    inputs = subject.inputs(run.sample)
    for name, gradient in run.outcome.gradients.items():
        if gradient is not None and gradient.shape != inputs[name].shape:
            shapes = f"{plain(gradient.shape)}, expected {plain(inputs[name].shape)}"
            yield f"the gradient of {name} has shape {shapes}"


def _damage(subject: Subject, run: _Run, fresh: Sample) -> Iterator[str]:
    results = run.outcome.results
    yield from damage(subject, run.sample, fresh, results)
    for index, result in enumerate(results):
        if any(share_memory(result, other) for other in results[:index]):
            yield "two of its results share memory"
    for name, tensor in subject.inputs(run.sample).items():
        for argument, gradient in run.outcome.gradients.items():
            if gradient is not None and share_memory(gradient, tensor):
                yield f"the gradient of {argument} shares memory with its input {name}"
    for upstream in run.upstream:
        if not same(upstream, upstream_of(upstream)):
            yield "wrote into the incoming gradient"


def damage(subject: Subject, sample: Sample, fresh: Sample, results: tuple[Tensor, ...]) -> Iterator[str]:
    """Phrases about inputs that a call wrote into, and about results that share memory with an input."""
    untouched = subject.inputs(fresh)
    for name, tensor in subject.inputs(sample).items():
        if not same(tensor.detach(), untouched[name].detach()):
            yield f"wrote into its input {name}"
        if any(share_memory(result, tensor) for result in results):
            yield f"its result shares memory with its input {name}"


def first_damage(subject: Subject, sample: Sample, fresh: Sample, results: tuple[Tensor, ...]) -> str | None:
    """The first phrase of :func:`damage`, as a part of a sentence."""
    found = next(damage(subject, sample, fresh, results), None)
    return found and (found if found.startswith("its") else f"it {found}")


def _rounding(subject: Subject, result: Tensor, eager: Tensor, what: str) -> str | None:
    allowed = subject.contract.rounding.get(subject.dtype_name)
    if allowed is None or not result.numel():
        return None
    share = float((result != eager).double().mean())
    if share <= allowed:
        return None
    return f"{what} is rounded elsewhere than the reference: {share:.0%} of elements differ, allowed {allowed:.0%}"


def _mean_errors(subject: Subject, position: Position, found: Outcome, eager: Outcome) -> Iterator[str]:
    """Sentences about what is too large or too small on average, with two sets of values."""
    first = _means(subject, found, subject.exact(position), eager)
    if not first:
        return
    other = subject.outcome(subject.draw(position, other=True))
    second = _means(
        subject, other, subject.exact(position, other=True), subject.reference(subject.draw(position, other=True))
    )
    for what, (mean, limit) in first.items():
        if what in second and mean * second[what][0] > 0:
            size = "large" if mean > 0 else "small"
            yield f"{what} is too {size} on average, by {abs(mean):.1e}, allowed {limit:.1e}"


def _means(subject: Subject, found: Outcome, exact: Outcome, eager: Outcome) -> dict[str, tuple[float, float]]:
    """By what it is, the mean error of what has more in 16 bits than it may, and than eager code; and what it may."""
    over: dict[str, tuple[float, float]] = {}
    if subject.dtype not in (torch.bfloat16, torch.float16):
        return over
    contract, dtype, count = subject.contract, subject.dtype_name, len(found.results)
    triples = [
        (result_name(index, count), contract.values[dtype], *each)
        for index, each in enumerate(zip(found.results, exact.results, eager.results, strict=True))
    ]
    triples += [
        (f"the gradient of {name}", contract.gradients[dtype], gradient, exact.gradients[name], eager.gradients[name])  # type: ignore[misc]
        for name, gradient in found.gradients.items()
    ]
    for what, allowed, mine, wanted, usual in triples:
        if mine is None or wanted is None or usual is None or mine.numel() < _FEW or not mine.is_floating_point():
            continue
        (mean, spread), (of_eager, _) = bias(mine, wanted), bias(usual, wanted)
        limit = min(_OF_NORM * allowed.norm, _OF_SPACING * torch.finfo(subject.dtype).eps)
        limit += _CHANCE * spread / math.sqrt(mine.numel()) + 2 * abs(of_eager)
        if abs(mean) > limit:
            over[what] = mean, limit
    return over


def _differences(first: Outcome, second: Outcome) -> Iterator[str]:
    if not all(same(a, b) for a, b in zip(first.results, second.results, strict=True)):
        yield "promises determinism, but two runs gave different results"
    for name, gradient in first.gradients.items():
        again = second.gradients[name]
        if gradient is not None and again is not None and not same(gradient, again):
            yield f"promises determinism, but two runs gave different gradients of {name}"
