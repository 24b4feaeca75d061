"""Lets the ranks of a job agree on a plan before anything is bound or loaded. veomni-conformance compares the plans."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from torch import distributed

from veomni_core.descriptions.references import load_for
from veomni_core.errors import BindingError, LockFileError, LockMismatchError
from veomni_core.planning.choice import expect, is_finite
from veomni_core.planning.plan import Plan

AGREEMENT_TIMEOUT = 300.0
_AGREE_ON_PLAN = "veomni_conformance.ranks.agreement:agree_on_plan"


@dataclass(frozen=True)
class Ranks:
    """The ranks that bind one model.

    Attributes:
        agree: False where each rank binds on its own.
        group: their process group; all ranks if it is ``None``.
        timeout: how many seconds they wait for one another.
    """

    agree: bool = True
    group: Any = None
    timeout: float = AGREEMENT_TIMEOUT

    def __post_init__(self) -> None:
        expect(is_finite(self.timeout) and self.timeout > 0, "agreement_timeout", self.timeout, "seconds above 0")
        expect(isinstance(self.agree, bool), "agree", self.agree, "True or False")

    def agree_on(self, make: Callable[[], Plan]) -> Plan:
        """Call ``make``, and return its plan once every rank has the same one. Without other ranks that is at once.

        Raises:
            PlanMismatchError: the ranks differ, or some did not answer
                (:func:`veomni_conformance.ranks.agreement.agree_on_plan`).
            BindingError: this process is not in the group, or veomni-conformance is not installed.
        """
        if not (self.agree and distributed.is_available() and distributed.is_initialized()):
            return make()
        ranks = distributed.get_process_group_ranks(self.group or distributed.group.WORLD)
        if ranks == [distributed.get_rank()]:
            return make()
        purpose = "ranks must agree on the plan, or bind with agree=False;"
        agree_on_plan = load_for(purpose, BindingError, _AGREE_ON_PLAN)
        return agree_on_plan(make, ranks, self.timeout)  # type: ignore[no-any-return]

    @contextmanager
    def refused_together(self) -> Iterator[None]:
        """Before the plan: where a lock file refuses this rank, :meth:`agree_on` raises on those that plan.

        Without that they would wait for a plan that never comes.
        """
        try:
            yield
        except (LockFileError, LockMismatchError) as refusal:
            self.agree_on(partial(_raise, refusal))
            raise


def _raise(error: Exception) -> NoReturn:
    raise error
