"""Makes all ranks of a job agree on the plan before anything is bound or loaded.

The plans are exchanged through the key-value store of ``torch.distributed``'s rendezvous.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager

from veomni_conformance.ranks.conditions import differences, rank_conditions
from veomni_conformance.ranks.exchange import NoAnswerError, RankExchange
from veomni_core.errors import BindingError, PlanMismatchError
from veomni_core.planning.plan import Plan


def agree_on_plan(make: Callable[[], Plan], ranks: list[int], timeout: float) -> Plan:
    """Call ``make``, and return its plan once every rank of ``ranks`` has the same one.

    If one rank can't plan, or plans differently (another package version, another GPU), the others would hang in their
    first collective. So the ranks exchange their plans, and all of them raise if the plans differ, or the versions and
    environment variables under which they compute (:func:`~veomni_conformance.ranks.conditions.rank_conditions`).

    Args:
        make: makes this rank's plan.
        ranks: the ranks that must agree, of an initialised ``torch.distributed``.
        timeout: how many seconds to wait for the other ranks.

    Raises:
        PlanMismatchError: raised on every rank. The plans or the conditions differ; the message names the ranks and in
            what. Or some ranks have ended, or have not answered within ``timeout``.
        BindingError: this process is not one of ``ranks``.
    """
    from torch import distributed

    if distributed.get_rank() not in ranks:
        raise BindingError(
            f"rank {distributed.get_rank()} is not in the group of ranks {_listed(ranks)} that should agree on the "
            "plan: pass the group that binds this model, or agree=False"
        )
    exchange = _PlanExchange(ranks, distributed.get_rank(), timeout)
    plan, failure = _attempt(make)
    mine = {"plan": plan.sha256 if plan else "", "failure": str(failure or ""), "conditions": rank_conditions()}
    answers = {rank: json.loads(text) for rank, text in exchange.all_of("digest", json.dumps(mine)).items()}
    if failure:
        exchange.end()
        raise failure
    failed = {rank: each["failure"] for rank, each in answers.items() if each["failure"]}
    if failed:
        exchange.end()
        details = "\n".join(f"rank {rank}: {text}" for rank, text in failed.items())
        raise PlanMismatchError(f"{len(failed)} of {len(ranks)} ranks can't plan:\n{details}")
    if unlike := differences({rank: each["conditions"] for rank, each in answers.items()}):
        exchange.end()
        raise PlanMismatchError(_unlike(unlike, answers))
    assert plan is not None
    if len({each["plan"] for each in answers.values()}) > 1:
        plans = exchange.all_of("plan", plan.to_json())
        exchange.end()
        raise PlanMismatchError(_differences({rank: Plan.from_json(text) for rank, text in plans.items()}))
    exchange.end()
    return plan


class _PlanExchange(RankExchange):
    """The exchange of plans, through the default store."""

    def __init__(self, ranks: list[int], rank: int, timeout: float) -> None:
        from torch.distributed.distributed_c10d import _get_default_store

        name = f"veomni_plan/{hashlib.sha256(str(ranks).encode()).hexdigest()[:16]}"  # another for other sets of ranks
        with _naming_the_missing(ranks, rank, timeout):
            super().__init__(_get_default_store(), name, ranks, rank, timeout, ("digest", "plan"))

    def all_of(self, what: str, answer: str) -> Mapping[int, str]:
        with _naming_the_missing(self.ranks, self.rank, self.timeout):
            return super().all_of(what, answer)


@contextmanager
def _naming_the_missing(ranks: list[int], rank: int, timeout: float) -> Iterator[None]:
    try:
        yield
    except NoAnswerError as error:
        missing = _listed(error.missing)
        if error.ended:
            raise PlanMismatchError(
                f"rank {rank} waits to agree on the plan, but the process of rank {missing} has ended; what that one "
                "printed says why"
            ) from error
        raise PlanMismatchError(
            f"rank {rank} binds a model, but rank {missing} of {_listed(ranks)} sent no plan within {timeout:g} s. If "
            "only some ranks bind this model (for evaluation, as a teacher, as a pipeline stage), pass agree=False, or "
            "group= their process group. If the others need more time to plan, pass a larger agreement_timeout"
        ) from error


def _differences(plans: Mapping[int, Plan]) -> str:
    first = min(plans)
    sentences = [
        f"rank {rank}: {sentence}"
        for rank, other in plans.items()
        if other.sha256 != plans[first].sha256
        for sentence in plans[first].diff(other)
    ]
    return "\n".join(
        [
            f"ranks would run different kernels; against rank {first}:",
            *sentences,
            "If that is intended, as in a pipeline, pass agree=False, or group= the ranks with equal plans",
        ]
    )


def _unlike(sentences: list[str], ranks: Collection[int]) -> str:
    return "\n".join(
        [
            f"ranks run under different conditions; against rank {min(ranks)}:",
            *sentences,
            "Start them with the same packages and variables. If the difference is intended, pass agree=False",
        ]
    )


def _listed(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"{shown} and {len(ranks) - 8} more" if len(ranks) > 8 else shown


def _attempt(make: Callable[[], Plan]) -> tuple[Plan | None, Exception | None]:
    try:
        return make(), None
    except Exception as error:  # any failure must reach the other ranks, which wait in the exchange
        return None, error
