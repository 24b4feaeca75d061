"""Checks calls that Hypothesis makes from the contract's samples, and reports the simplest one that fails.

Each call has some of a sample's rows (none, one, many, one of them repeatedly), values at the ends of their dtype,
tensors that overlap or repeat in memory, and some inputs frozen, with or without gradients, once or twice. They meet
in one call, which samples that somebody wrote down never do.

A call counts only where its answer is certain. The reference in the kernel's dtype must be within the tolerance, and
the oracle must stay within it when the inputs change by less than a rounding. So nothing is asked where a sum overflows,
where a gradient cancels to noise, or which of two equal scores is chosen.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import torch

from veomni_core.errors import ContractError
from veomni_core.ops.contract import Sample
from veomni_core.testing.comparison import one_line, same
from veomni_core.testing.sample_changes import MEMORY, VALUES, SampleChange, nudged
from veomni_core.testing.sample_tensors import copy_of, to_float64
from veomni_core.testing.subject import Outcome, Position, Subject

MISSING = "generated samples: Hypothesis is not installed (pip install 'veomni-core[testing]')"
_BASES = 4  # the smallest samples, from which calls are made
_EXAMPLES, _EXAMPLES_INTERPRETED = 12, 3
_ROUNDING = 0.25  # of the dtype's precision


class _WrongAnswerError(Exception):
    """The kernel's answer to a generated call is wrong."""


def hypothesis_is_installed() -> bool:
    """Whether generated samples can be asked for."""
    return importlib.util.find_spec("hypothesis") is not None


def check_generated_samples(subject: Subject, positions: list[Position], interpreted: bool) -> Iterator[str]:
    """Run some dozen calls, always the same ones, and fewer in an interpreter."""
    from hypothesis import HealthCheck, Phase, Verbosity, assume, given, settings
    from hypothesis import strategies as st
    from hypothesis.errors import Flaky, Unsatisfiable

    bases = _smallest(subject, positions)
    if not bases:
        return

    def several(choices: tuple[Any, ...]) -> Any:
        return st.lists(st.sampled_from(choices), min_size=1, max_size=3).map(tuple)

    some_rows = st.lists(st.integers(0, 6), max_size=6).map(tuple)
    changes = st.builds(
        SampleChange,
        rows=st.one_of(st.none(), some_rows, st.just(tuple(range(33)))) if subject.contract.rows else st.none(),
        values=several(VALUES),
        memory=several(MEMORY),
        frozen=several((False, True)),
        shared=st.booleans(),
    )

    # Every call of an interpreted kernel is slow, so a failing one is reported as it was found.
    @settings(
        max_examples=_EXAMPLES_INTERPRETED if interpreted else _EXAMPLES,
        phases=[Phase.generate] if interpreted else [Phase.generate, Phase.shrink],
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        verbosity=Verbosity.quiet,
        report_multiple_bugs=False,
    )
    @given(st.sampled_from(bases), changes, st.booleans(), st.booleans())
    def attempt(base: Position, change: SampleChange, recording: bool, twice: bool) -> None:
        sample = change.applied(subject, subject.sample(base))
        exact = _certain(subject, sample)
        assume(exact is not None)
        assert exact is not None
        if problem := _problem(subject, sample, exact, recording, twice):
            modes = "" if recording else ", under torch.no_grad()"
            again = ", called again" if twice else ""
            raise _WrongAnswerError(f"made from {sample.name!r} ({change}){modes}{again}: {problem}")

    try:
        attempt()
    except Unsatisfiable:
        return  # no call had a certain answer
    except Flaky as error:
        yield f"a generated call is right in one run and wrong in the next: {one_line(error)}"
    except _WrongAnswerError as error:
        yield str(error)


def _smallest(subject: Subject, positions: list[Position]) -> list[Position]:
    def size(position: Position) -> int:
        return sum(tensor.numel() for tensor in subject.inputs(subject.sample(position)).values())

    asked = [each for each in positions if subject.is_asked_more(each) and size(each)]
    return sorted(asked, key=size)[:_BASES]


def _certain(subject: Subject, sample: Sample) -> Outcome | None:
    """The oracle's outcome, if it is finite, well-conditioned, and what the reference computes in the kernel's dtype."""
    rounding = _ROUNDING * torch.finfo(subject.dtype).eps
    try:
        exact = subject.reference(to_float64(copy_of(sample)))
        if not all(bool(result.isfinite().all()) for result in exact.results):
            return None
        if subject.problem(subject.reference(to_float64(nudged(sample, rounding))), exact):
            return None
        return None if subject.problem(subject.reference(copy_of(sample)), exact) else exact
    except ContractError:  # the contract does not cover such a call
        return None


def _problem(subject: Subject, sample: Sample, exact: Outcome, recording: bool, twice: bool) -> str | None:
    called = copy_of(sample)
    try:
        for _ in range(1 + twice):
            if recording:
                found = subject.outcome(called)
            else:
                with torch.no_grad():
                    found = Outcome(subject.call(called))
    except Exception as error:  # whatever a kernel raises on a legal call is a failure of the kernel
        return f"it raises {one_line(error)}"
    untouched = subject.inputs(sample)
    for name, tensor in subject.inputs(called).items():
        if not same(tensor.detach(), untouched[name].detach()):
            return f"it wrote into its input {name}"
    return subject.problem(found, exact)
