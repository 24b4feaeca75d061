"""Makes all processes of a job agree on the plan before anything is bound or loaded.

The plans travel through the store that ``torch.distributed`` keeps for its own rendezvous: it works beside every
backend, touches no GPU, and can say which ranks have not come.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from veomni_core.errors import BindingError, PlanMismatchError
from veomni_core.plan import Plan

AGREEMENT_TIMEOUT = 300.0
_rounds: Counter[str] = Counter()


def agree_on_plan(
    make: Callable[[], Plan], *, agree: bool = True, group: Any = None, timeout: float = AGREEMENT_TIMEOUT
) -> Plan:
    """The plan that ``make`` gives, once every rank of ``group`` has the same one.

    A rank that cannot plan, or that plans otherwise (another package version, another GPU), would leave the rest
    waiting in their first collective; so the plans are exchanged, and a difference is raised on every rank. ``group``
    is a process group, all ranks where it is ``None``. With ``agree=False``, or without ``torch.distributed``, nothing
    is exchanged. ``timeout`` is in seconds.

    Raises:
        PlanMismatchError: on every rank, naming the ranks that differ and what they would run instead; or some ranks
            have not come within ``timeout``.
        BindingError: this process is not in ``group``.
    """
    from torch import distributed

    if not (agree and distributed.is_available() and distributed.is_initialized()):
        return make()
    ranks = distributed.get_process_group_ranks(group or distributed.group.WORLD)
    if distributed.get_rank() not in ranks:
        raise BindingError(
            f"rank {distributed.get_rank()} is not in the group of ranks {_listed(ranks)} that should agree on the "
            "plan: pass the group that binds this model, or agree=False"
        )
    if len(ranks) == 1:
        return make()
    plan, failure = _attempt(make)
    exchange = _Exchange(ranks, distributed.get_rank(), timeout)
    answers = exchange.all_of("digest", json.dumps([plan.sha256 if plan else "", f"{failure}" if failure else ""]))
    if failure:
        exchange.end()
        raise failure
    digests = {rank: json.loads(answer) for rank, answer in answers.items()}
    failed = {rank: text for rank, (_, text) in digests.items() if text}
    if failed:
        exchange.end()
        details = "\n".join(f"rank {rank}: {text}" for rank, text in failed.items())
        raise PlanMismatchError(f"{len(failed)} of {len(ranks)} ranks can't plan:\n{details}")
    assert plan is not None
    if len({digest for digest, _ in digests.values()}) > 1:
        plans = exchange.all_of("plan", plan.to_json())
        exchange.end()
        raise PlanMismatchError(_differences({rank: Plan.from_json(text) for rank, text in plans.items()}))
    exchange.end()
    return plan


class _Exchange:
    """One round in which each of ``ranks`` gives an answer and reads all others', through the default store."""

    def __init__(self, ranks: list[int], rank: int, timeout: float) -> None:
        from torch.distributed.distributed_c10d import _get_default_store

        self._store, self._ranks, self._rank, self._timeout = _get_default_store(), ranks, rank, timeout
        # Ranks that bind in the same order count alike. What only some ranks bind, they do with a group of their own.
        self._name = f"veomni_plan/{hashlib.sha256(str(ranks).encode()).hexdigest()[:16]}"
        self._prefix = f"{self._name}/{_rounds[self._name]}"

    def all_of(self, what: str, answer: str) -> Mapping[int, str]:
        """Every rank's answer, this rank's too."""
        mine = self._key(what, self._rank)
        self._store.set(mine, answer)
        keys = [self._key(what, rank) for rank in self._ranks]
        try:
            self._store.wait(keys, timedelta(seconds=self._timeout))
        except Exception as error:  # c10d raises DistStoreError, and RuntimeError or ValueError for some stores
            missing = [rank for rank in self._ranks if not self._store.check([self._key(what, rank)])]
            if not missing:
                raise
            self._store.delete_key(mine)  # so that ranks that come later don't take it for an agreement
            raise PlanMismatchError(
                f"rank {self._rank} binds a model, and rank {_listed(missing)} of {_listed(self._ranks)} did not come "
                f"to agree on its plan within {self._timeout:g} s. If only some ranks bind this model (for evaluation, "
                "as a teacher, as a stage of a pipeline), pass agree=False, or group= their process group. If the "
                "others only plan for longer, pass a longer agreement_timeout"
            ) from error
        return {rank: self._store.get(key).decode() for rank, key in zip(self._ranks, keys, strict=True)}

    def end(self) -> None:
        """Let the next agreement of these ranks use other keys, and forget those of the round before this one.

        Rank 0 serves the store, and its process may end right after: it leaves last.
        """
        here = self._store.add(f"{self._prefix}/left", 1)
        if self._rank == 0 and here < len(self._ranks):
            ends = time.monotonic() + self._timeout
            while self._store.add(f"{self._prefix}/left", 0) < len(self._ranks) and time.monotonic() < ends:
                time.sleep(0.01)
        previous = _rounds[self._name] - 1
        _rounds[self._name] += 1
        for what in ("digest", "plan"):  # every rank has read that round, or it would not have come to this one
            if previous >= 0 and self._store.check([key := f"{self._name}/{previous}/{what}/{self._rank}"]):
                self._store.delete_key(key)

    def _key(self, what: str, rank: int) -> str:
        return f"{self._prefix}/{what}/{rank}"


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
            "If they should, as stages of a pipeline do, pass agree=False, or group= the ranks that are alike",
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
