"""Lets all ranks of a launch hear that a lock file refuses one of them, before any of them starts its job."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from veomni_core.discovery.discover import discover
from veomni_core.errors import LockMismatchError

_LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_TIMEOUT = 300.0
_stores: list[Any] = []  # rank 0 serves the store, and the process group of the job meets at the same address


def refuse_on_all_ranks(refusal: Exception | None = None) -> None:
    """Find the plugins under ``VEOMNI_FROZEN``; raise the same error on every rank if one of them is refused.

    A process that no launcher started asks nobody, and leaves it to the verb to find the plugins.

    Args:
        refusal: why this rank is refused already, so that it doesn't look for plugins.

    Raises:
        LockMismatchError: this rank or another one is refused, and the message says which; or some did not answer.
        LockFileError, or another error of :func:`~veomni_core.discover`: all ranks are refused for the same reason.
    """
    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if ranks == 1 or any(name not in os.environ for name in _LAUNCHED):
        return
    if refusal is None:
        try:
            discover()
        except Exception as error:  # whatever it is must reach the other ranks, which wait
            refusal = error
    answers = _answers_of_all(rank, ranks, (str(refusal) or repr(refusal)) if refusal else "")
    refused = {each: text for each, text in answers.items() if text}
    if refusal and len(refused) == ranks and len({*refused.values()}) == 1:
        raise refusal
    if refused:
        listed = "\n".join(f"rank {each}: {text}" for each, text in refused.items())
        raise LockMismatchError(f"{len(refused)} of {ranks} ranks are refused:\n{listed}")


def _answers_of_all(rank: int, ranks: int, answer: str) -> Mapping[int, str]:
    from torch.distributed.rendezvous import rendezvous

    from veomni_conformance.ranks.exchange import NoAnswerError, RankExchange

    store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=_TIMEOUT)))
    _stores.append(store)
    try:
        exchange = RankExchange(store, "veomni_frozen", list(range(ranks)), rank, _TIMEOUT, ("refusal",))
        answers = exchange.all_of("refusal", json.dumps(answer))
    except NoAnswerError as error:
        raise LockMismatchError(
            f"rank {rank} is frozen, and {error}{'' if error.ended else f' within {_TIMEOUT:g} s'}: start all ranks "
            "with the same lock file"
        ) from error
    exchange.end()
    return {each: json.loads(text) for each, text in answers.items()}
