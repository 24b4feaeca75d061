"""An all-gather of strings among ranks through a key-value store, which can tell which ranks have not answered.

It works with every backend, uses no GPU, and needs no process group where a store is given.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

_rounds: Counter[str] = Counter()


class NoAnswerError(Exception):
    """Some ranks did not answer in time. Who exchanges says in an error of its own what that means.

    Attributes:
        missing: those ranks.
    """

    def __init__(self, missing: list[int]) -> None:
        super().__init__(f"ranks {missing} did not answer")
        self.missing = missing


class RankExchange:
    """One round of exchanges among ``ranks``.

    Args:
        store: a store of ``torch.distributed`` that all of them reach.
        name: what is exchanged, and among whom: rounds of different names have different keys.
        ranks: the ranks.
        rank: this one.
        timeout: how many seconds to wait for the others.
        kinds: what the rounds of this name exchange.
    """

    def __init__(
        self, store: Any, name: str, ranks: list[int], rank: int, timeout: float, kinds: tuple[str, ...]
    ) -> None:
        self._store, self._name, self.ranks, self.rank, self.timeout = store, name, ranks, rank, timeout
        # The round's number agrees across ranks that exchange in the same order.
        self._prefix, self._kinds = f"{name}/{_rounds[name]}", kinds

    def all_of(self, what: str, answer: str) -> Mapping[int, str]:
        """The answers of all ranks, including this one's ``answer``.

        Raises:
            NoAnswerError: some ranks did not answer in time.
        """
        mine = self._key(what, self.rank)
        self._store.set(mine, answer)
        keys = [self._key(what, rank) for rank in self.ranks]
        try:
            self._store.wait(keys, timedelta(seconds=self.timeout))
        except Exception as error:  # c10d raises DistStoreError, and RuntimeError or ValueError for some stores
            missing = [rank for rank in self.ranks if not self._store.check([self._key(what, rank)])]
            if not missing:
                raise
            self._store.delete_key(mine)  # so that ranks that arrive later don't mistake it for an agreement
            raise NoAnswerError(missing) from error
        return {rank: self._store.get(key).decode() for rank, key in zip(self.ranks, keys, strict=True)}

    def end(self) -> None:
        """Finish the round: later rounds of these ranks use other keys, and the keys of the previous round are deleted.

        Rank 0 serves the store and may exit right after this call, so it waits until all other ranks have left.
        """
        here = self._store.add(f"{self._prefix}/left", 1)
        if self.rank == 0 and here < len(self.ranks):
            ends = time.monotonic() + self.timeout
            while self._store.add(f"{self._prefix}/left", 0) < len(self.ranks) and time.monotonic() < ends:
                time.sleep(0.01)
        previous = _rounds[self._name] - 1
        _rounds[self._name] += 1
        for what in self._kinds:  # all ranks have read that round, or they would not be in this one
            if previous >= 0 and self._store.check([key := f"{self._name}/{previous}/{what}/{self.rank}"]):
                self._store.delete_key(key)

    def _key(self, what: str, rank: int) -> str:
        return f"{self._prefix}/{what}/{rank}"
