"""Runs a check in one situation of training, and puts its failure into one sentence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain

from veomni_conformance.comparison import one_line
from veomni_core.errors import ContractError

Problem = Callable[[], str | None]


def reveal(
    situation: str, problem: Problem, may_refuse: bool = False, without: tuple[str, Problem] | None = None
) -> Iterator[str]:
    """Yield the sentence "``situation``, ``problem``" if ``problem()`` returns a problem or raises.

    With ``may_refuse``, an exception with a message counts as success: the user of the kernel sees the error.
    ``without`` is the same call without what the situation is about, and words for it. It is made where a problem was
    found, and the sentence is about it if it fails too.
    """
    if without is None:
        yield from _revealed(situation, problem, may_refuse)
        return
    for sentence in _revealed(situation, problem, may_refuse):
        yield from first_of(chain(_revealed(*without, may_refuse), (sentence,)))


def _revealed(situation: str, problem: Problem, may_refuse: bool) -> Iterator[str]:
    try:
        found = problem()
    except ContractError:
        raise
    except Exception as error:  # whatever a kernel raises on a legal call is a failure of the kernel
        if not (may_refuse and str(error).strip()):
            yield f"{situation}, it raises {one_line(error)}"
        return
    if found:
        yield f"{situation}, {found}"


def first_of(sentences: Iterator[str]) -> Iterator[str]:
    """Only the first sentence, since similar situations usually fail for the same reason."""
    sentence = next(sentences, None)
    if sentence is not None:
        yield sentence
