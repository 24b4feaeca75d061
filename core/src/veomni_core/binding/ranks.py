"""Makes all ranks of a job agree on the plan before anything is bound or loaded.

The plans are exchanged through the key-value store of ``torch.distributed``'s rendezvous. It works with every backend,
uses no GPU, and can tell which ranks have not answered.
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
from veomni_core.planning.plan import Plan

AGREEMENT_TIMEOUT = 300.0
_rounds: Counter[str] = Counter()


def agree_on_plan(
    make: Callable[[], Plan], *, agree: bool = True, group: Any = None, timeout: float = AGREEMENT_TIMEOUT
) -> Plan:
    """Call ``make``, and return its plan once every rank of ``group`` has the same one.

    If one rank can't plan, or plans differently (another package version, another GPU), the others would hang in their
    first collective. So the ranks exchange their plans, and all of them raise if the plans differ.

    Args:
        make: makes this rank's plan.
        agree: False skips the exchange. Without an initialised ``torch.distributed`` it is skipped too.
        group: the process group whose ranks must agree; all ranks if it is ``None``.
        timeout: how many seconds to wait for the other ranks.

    Raises:
        PlanMismatchError: raised on every rank. The plans differ; the message names the ranks and what they would run.
            Or some ranks have not answered within ``timeout``.
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
    """One round of an all-gather of strings among ``ranks``, through the default store."""

    def __init__(self, ranks: list[int], rank: int, timeout: float) -> None:
        from torch.distributed.distributed_c10d import _get_default_store

        self._store, self._ranks, self._rank, self._timeout = _get_default_store(), ranks, rank, timeout
        # The round's number agrees across ranks that bind in the same order. Other sets of ranks have other keys.
        self._name = f"veomni_plan/{hashlib.sha256(str(ranks).encode()).hexdigest()[:16]}"
        self._prefix = f"{self._name}/{_rounds[self._name]}"

    def all_of(self, what: str, answer: str) -> Mapping[int, str]:
        """The answers of all ranks, including this one's ``answer``."""
        mine = self._key(what, self._rank)
        self._store.set(mine, answer)
        keys = [self._key(what, rank) for rank in self._ranks]
        try:
            self._store.wait(keys, timedelta(seconds=self._timeout))
        except Exception as error:  # c10d raises DistStoreError, and RuntimeError or ValueError for some stores
            missing = [rank for rank in self._ranks if not self._store.check([self._key(what, rank)])]
            if not missing:
                raise
            self._store.delete_key(mine)  # so that ranks that arrive later don't mistake it for an agreement
            raise PlanMismatchError(
                f"rank {self._rank} binds a model, but rank {_listed(missing)} of {_listed(self._ranks)} sent no plan "
                f"within {self._timeout:g} s. If only some ranks bind this model (for evaluation, as a teacher, as a "
                "pipeline stage), pass agree=False, or group= their process group. If the others need more time to "
                "plan, pass a larger agreement_timeout"
            ) from error
        return {rank: self._store.get(key).decode() for rank, key in zip(self._ranks, keys, strict=True)}

    def end(self) -> None:
        """Finish the round: later rounds of these ranks use other keys, and the keys of the previous round are deleted.

        Rank 0 serves the store and may exit right after this call, so it waits until all other ranks have left.
        """
        here = self._store.add(f"{self._prefix}/left", 1)
        if self._rank == 0 and here < len(self._ranks):
            ends = time.monotonic() + self._timeout
            while self._store.add(f"{self._prefix}/left", 0) < len(self._ranks) and time.monotonic() < ends:
                time.sleep(0.01)
        previous = _rounds[self._name] - 1
        _rounds[self._name] += 1
        for what in ("digest", "plan"):  # all ranks have read that round, or they would not be in this one
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
            "If that is intended, as in a pipeline, pass agree=False, or group= the ranks with equal plans",
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
