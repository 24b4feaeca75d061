"""Checks calls that are made from the contract's samples, in combinations that Hypothesis draws and simplifies.

Each call has some of a sample's rows (none, one, many, one of them repeatedly), values at the ends of their dtype,
tensors that overlap or repeat in memory, and some inputs frozen, with or without gradients, once or twice. They meet
in one call, which samples that somebody wrote down never do.

A call counts only where its answer is certain. The reference in the kernel's dtype must be within the tolerance, and
the oracle must stay within it when the inputs change by less than a rounding. And a kernel at most twice as far from
the oracle as the reference is right. So nothing is asked where a sum overflows, where a gradient cancels to noise, or
which of two equal scores is chosen.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from veomni_conformance.comparison import distance, one_line
from veomni_conformance.sample_changes import INFINITE, MEMORY, ONE, USUAL, VALUES, SampleChange, is_a_choice, nudged
from veomni_conformance.sample_tensors import copy_of, to_float64
from veomni_conformance.subject import Outcome, Position, Subject, described
from veomni_conformance.tensor_layouts import CONTIGUOUS
from veomni_conformance.values import first_damage
from veomni_core.errors import ContractError
from veomni_ops.contract import Sample

MISSING = "combinations of generated samples: Hypothesis is not installed (pip install 'veomni-conformance[testing]')"
_BASES = 4  # the smallest samples, from which calls are made
_MANY = tuple(range(33))  # rows: more than the 32 that many kernels put into a tile
_ONE_MORE = tuple(range(65))  # than a tile of 64 has
_EXAMPLES = 16
_ROUNDING = 0.25  # of the dtype's precision
_ALONE = (
    SampleChange(rows=()),
    SampleChange(memory=("overlapping",)),
    SampleChange(rows=_MANY),
    SampleChange(rows=_ONE_MORE),
    SampleChange(rows=(0,), memory=(CONTIGUOUS,)),
    SampleChange(values=(ONE,)),
    SampleChange(values=(USUAL, ONE)),
    SampleChange(values=(USUAL, "zero")),
    SampleChange(values=("zero", USUAL)),
    *(SampleChange(values=(kind,)) for kind in VALUES if kind != USUAL),
    *(SampleChange(values=(kind, USUAL)) for kind in ("denormal", INFINITE)),
    SampleChange(memory=("expanded",)),
    SampleChange(shared=True),
)
_INTERPRETED = 2  # of these, in an interpreter


@dataclass(frozen=True)
class _Call:
    """A call that is made from a sample."""

    base: Position
    change: SampleChange
    without_gradients: bool = False
    again: bool = False


class _WrongAnswerError(Exception):
    """The kernel's answer to a generated call is wrong."""


def hypothesis_is_installed() -> bool:
    """Whether generated samples can be asked for."""
    return importlib.util.find_spec("hypothesis") is not None


def check_generated_samples(subject: Subject, positions: list[Position], interpreted: bool) -> Iterator[str]:
    """Make each change alone; then, with Hypothesis, several at a time, always the same ones.

    In an interpreter, where each call is slow, only the first few.
    """
    bases = _smallest(subject, positions)
    if not bases:
        return
    for change in _ALONE[:_INTERPRETED] if interpreted else _ALONE:
        for without_gradients in (False, True)[: 1 + (change.values != (USUAL,))]:
            if problem := _wrong(subject, _Call(bases[0], change, without_gradients)):
                yield problem
                return
    if hypothesis_is_installed() and not interpreted:
        yield from _combined(subject, bases)


def _combined(subject: Subject, bases: list[Position]) -> Iterator[str]:
    from hypothesis import HealthCheck, Phase, Verbosity, given, settings
    from hypothesis import strategies as st
    from hypothesis.errors import Flaky

    def several(choices: tuple[Any, ...]) -> Any:
        return st.lists(st.sampled_from(choices), min_size=1, max_size=3).map(tuple)

    some_rows = st.lists(st.integers(0, 6), max_size=6).map(tuple)
    changes = st.builds(
        SampleChange,
        rows=st.one_of(st.none(), some_rows, st.just(_MANY)) if subject.contract.rows else st.none(),
        values=several(VALUES),
        memory=several(MEMORY),
        frozen=several((False, True)),
        shared=st.booleans(),
    )

    @settings(
        max_examples=_EXAMPLES,
        phases=[Phase.generate, Phase.shrink],
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        verbosity=Verbosity.quiet,
        report_multiple_bugs=False,
    )
    @given(st.builds(_Call, st.sampled_from(bases), changes, st.booleans(), st.booleans()))
    def attempt(call: _Call) -> None:
        if problem := _wrong(subject, call):
            raise _WrongAnswerError(problem)

    try:
        attempt()
    except Flaky as error:
        yield f"a generated call is right in one run and wrong in the next: {one_line(error)}"
    except _WrongAnswerError as error:
        yield str(error)


def _smallest(subject: Subject, positions: list[Position]) -> list[Position]:
    """The smallest samples, without those that have an empty tensor, and preferably with results and gradients.

    Elsewhere changes of values would change nothing.
    """

    def sizes(position: Position) -> list[int]:
        return [tensor.numel() for tensor in subject.inputs(subject.sample(position)).values()]

    asked = [each for each in positions if subject.is_asked_more(each) and all(sizes(each))]
    asked.sort(key=lambda position: sum(sizes(position)))
    telling = itertools.islice((each for each in asked if subject.tells(each)), _BASES)
    return [*telling] or asked[:_BASES]


def _wrong(subject: Subject, call: _Call) -> str | None:
    """What is wrong with the kernel's answer to a call; ``None`` if it is right, or if no answer is certain."""
    sample = call.change.applied(subject, subject.sample(call.base))
    exact = _finite_outcome(subject, sample)
    if exact is None:
        return None
    found: Outcome | None = None
    damaged, called = None, copy_of(sample)
    try:
        found = _outcome(subject, called, call)
        damaged = first_damage(subject, called, sample, found.results)
        problem = damaged or subject.problem(found, exact) or _not_finite(found)
        if INFINITE in call.change.values and _spreads_in_its_row(found):
            return None
    except Exception as error:  # whatever a kernel raises on a legal call is a failure of the kernel
        problem = f"it raises {one_line(error)}"
    if not problem:
        return None
    if not damaged and (
        is_a_choice(subject, to_float64(copy_of(sample)), exact, subject.exact(call.base))
        or not _is_certain(subject, sample, exact, found)
    ):
        return None
    modes = ", under torch.no_grad()" * call.without_gradients + ", called again" * call.again
    return f"made from {sample.name!r} ({call.change}){modes}: {problem} [{described(subject, sample)}]"


def _outcome(subject: Subject, sample: Sample, call: _Call) -> Outcome:
    """The outcome of the last call."""
    if call.without_gradients:
        with torch.no_grad():
            return [Outcome(subject.call(sample)) for _ in range(1 + call.again)][-1]
    return [subject.outcome(sample) for _ in range(1 + call.again)][-1]


def _spreads_in_its_row(found: Outcome) -> bool:
    """Whether the results are finite but for their first rows, in which an infinite element of an input may spread."""
    broken = [result for result in found.results if not result.isfinite().all()]
    return bool(broken) and all(result.dim() and bool(result[1:].isfinite().all()) for result in broken)


def _not_finite(found: Outcome) -> str | None:
    """About gradients that the oracle has as zeros, and that are not compared further."""
    wrong = [name for name, each in found.gradients.items() if each is not None and not each.isfinite().all()]
    return f"the gradient of {wrong[0]} is not finite" if wrong else None


def _finite_outcome(subject: Subject, sample: Sample) -> Outcome | None:
    """The oracle's outcome, without gradients of zeros; ``None`` if it can't be computed, or a result is not finite."""
    try:
        exact = subject.reference(to_float64(copy_of(sample)))
    except ContractError:  # the contract does not cover such a call
        return None
    if not all(bool(result.isfinite().all()) for result in exact.results):
        return None
    # A gradient that is zero everywhere, as of a saturated softmax, leaves no scale for a difference that cancels.
    gradients = {name: None if each is None or not each.any() else each for name, each in exact.gradients.items()}
    return Outcome(exact.results, gradients)


def _is_certain(subject: Subject, sample: Sample, exact: Outcome, found: Outcome | None) -> bool:
    """Whether the call is well-conditioned, and the reference is right in the kernel's dtype, and twice as near.

    Only asked where a kernel fails, since it takes as long as the call itself.
    """
    rounding = _ROUNDING * torch.finfo(subject.dtype).eps
    try:
        if subject.problem(subject.reference(nudged(to_float64(copy_of(sample)), rounding)), exact):
            return False
        eager = subject.reference(copy_of(sample))
    except ContractError:
        return False
    if subject.problem(eager, exact) or _not_finite(eager):
        return False
    # Numbers that are denormal in the results too are rounded so coarsely that one rounding more breaks a tolerance.
    if found is None or _not_finite(found):
        return True
    return _farthest(subject, found, exact) > 2 * _farthest(subject, eager, exact)


def _farthest(subject: Subject, found: Outcome, exact: Outcome) -> float:
    """The largest error, as a share of its tolerance."""
    contract, dtype = subject.contract, subject.dtype_name
    shares = [
        distance(result, wanted, contract.values[dtype], "")[0]
        for result, wanted in zip(found.results, exact.results, strict=False)
    ]
    for name, gradient in found.gradients.items():
        wanted = exact.gradients[name]
        if gradient is not None and wanted is not None:
            shares.append(distance(gradient, wanted, contract.gradients[dtype], "")[0])
    missing = any(gradient is None and exact.gradients[name] is not None for name, gradient in found.gradients.items())
    return float("inf") if missing else max(shares, default=0.0)
