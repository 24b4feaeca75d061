"""How a question puts a kernel into a situation, and says in one sentence what came of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from veomni_core.errors import ContractError
from veomni_core.testing.comparison import one_line

Problem = Callable[[], str | None]


def reveal(situation: str, problem: Problem, may_refuse: bool = False) -> Iterator[str]:
    """The sentence "``situation``, ``problem``", if ``problem()`` finds one or the kernel raises.

    With ``may_refuse`` an exception with a message is a good answer: whoever trains learns of it.
    """
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
    """The first sentence alone: situations of one kind mostly show one fault."""
    sentence = next(sentences, None)
    if sentence is not None:
        yield sentence
