"""Makes all processes of a job agree on the plan before anything is bound or loaded."""

from __future__ import annotations

from collections.abc import Callable

from veomni_core.errors import PlanMismatchError
from veomni_core.plan import Plan


def agree_on_plan(make: Callable[[], Plan]) -> Plan:
    """The plan that ``make`` gives, once every rank of ``torch.distributed`` has the same one.

    A rank that cannot plan, or that plans otherwise (another package version, another GPU), would leave the rest
    waiting in their first collective; so the plans are exchanged, and a difference is raised on every rank.

    Raises:
        PlanMismatchError: on every rank, naming the ranks that differ and what they would run instead.
    """
    from torch import distributed

    if not (distributed.is_available() and distributed.is_initialized()):
        return make()
    plan, failure = _attempt(make)
    answers: list[tuple[str, str]] = [("", "")] * distributed.get_world_size()
    distributed.all_gather_object(answers, (plan.to_json() if plan else "", f"{failure}" if failure else ""))
    if failure:
        raise failure
    failed = {rank: text for rank, (_, text) in enumerate(answers) if text}
    if failed:
        details = "\n".join(f"rank {rank}: {text}" for rank, text in failed.items())
        raise PlanMismatchError(f"{len(failed)} of {len(answers)} ranks can't plan:\n{details}")
    plans = [Plan.from_json(text) for text, _ in answers]
    differences = [
        f"rank {rank}: {sentence}"
        for rank, other in enumerate(plans)
        if other.sha256 != plans[0].sha256
        for sentence in plans[0].diff(other)
    ]
    if differences:
        raise PlanMismatchError("ranks would run different kernels; against rank 0:\n" + "\n".join(differences))
    assert plan is not None
    return plan


def _attempt(make: Callable[[], Plan]) -> tuple[Plan | None, Exception | None]:
    try:
        return make(), None
    except Exception as error:  # any failure must reach the other ranks, which wait in the exchange
        return None, error
