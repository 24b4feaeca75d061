"""Gathers what the ranks of a distributed job have to say, so that all of them can end with the same error."""

from __future__ import annotations

import json

from veomni_conformance.ranks.exchange import NoAnswerError, RankExchange
from veomni_core.binding.ranks import AGREEMENT_TIMEOUT
from veomni_core.errors import HostError


def sentences_of_all_ranks(what: str, mine: list[str], timeout: float = AGREEMENT_TIMEOUT) -> list[str]:
    """The sentences of every rank, each with its rank in front; of a job in one process ``mine``.

    Args:
        what: what they are about. Every rank calls this equally often for it.
        mine: this rank's.
        timeout: how many seconds to wait for the other ranks.

    Raises:
        HostError: some ranks did not answer in time.
    """
    from torch import distributed

    if not (distributed.is_available() and distributed.is_initialized()) or distributed.get_world_size() == 1:
        return mine
    from torch.distributed.distributed_c10d import _get_default_store

    rank, ranks = distributed.get_rank(), list(range(distributed.get_world_size()))
    try:
        exchange = RankExchange(_get_default_store(), f"veomni_{what}", ranks, rank, timeout, ("sentences",))
        answers = exchange.all_of("sentences", json.dumps(mine))
    except NoAnswerError as error:
        raise HostError(
            f"rank {rank} waits for the other ranks ({what}), but rank {', '.join(map(str, error.missing))} "
            f"{'has ended' if error.ended else f'did not answer within {timeout:g} s'}"
        ) from error
    exchange.end()
    return [f"rank {each}: {sentence}" for each, answer in answers.items() for sentence in json.loads(answer)]
