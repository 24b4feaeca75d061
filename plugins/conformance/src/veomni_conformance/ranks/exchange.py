"""An all-gather of strings among ranks through a key-value store, which can tell which ranks have not answered.

It works with every backend, uses no GPU, and needs no process group where a store is given.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from torch.distributed import DistNetworkError

from veomni_conformance.ranks.processes import is_running, this_process

_PROCESS = "process"
_LOOK_EVERY = 1.0  # seconds between two looks at whether the ranks that are waited for still run
_rounds: Counter[str] = Counter()


class NoAnswerError(Exception):
    """Some ranks did not answer. Who exchanges says in an error of its own what that means.

    Attributes:
        missing: those ranks.
        ended: whether their processes have ended, so that waiting longer is in vain.
    """

    def __init__(self, missing: list[int], ended: bool = False) -> None:
        super().__init__(f"ranks {missing} {'have ended' if ended else 'did not answer'}")
        self.missing, self.ended = missing, ended


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
        self._prefix, self._kinds = f"{name}/{_rounds[name]}", (_PROCESS, *kinds)
        with self._reaching_the_store():
            self._store.set(self._key(_PROCESS, rank), this_process())

    def all_of(self, what: str, answer: str) -> Mapping[int, str]:
        """The answers of all ranks, including this one's ``answer``.

        Raises:
            NoAnswerError: some ranks did not answer in time, or have ended.
        """
        keys = {rank: self._key(what, rank) for rank in self.ranks}
        with self._reaching_the_store():
            self._store.set(keys[self.rank], answer)
            until = time.monotonic() + self.timeout
            while missing := [rank for rank, key in keys.items() if not self._store.check([key])]:
                if ended := self._ended(missing, keys):
                    self._leave(len(self.ranks) - len(ended))
                    raise NoAnswerError(ended, ended=True)
                left = until - time.monotonic()
                if left <= 0:
                    self._store.delete_key(keys[self.rank])  # ranks that come later must not take it for an agreement
                    raise NoAnswerError(missing)
                # c10d raises DistStoreError when the time is over, and some stores RuntimeError or ValueError.
                with suppress(RuntimeError, ValueError):
                    self._store.wait(list(keys.values()), timedelta(seconds=min(left, _LOOK_EVERY)))
            return {rank: self._store.get(key).decode() for rank, key in keys.items()}

    def end(self) -> None:
        """Finish the round: later rounds of these ranks use other keys, and the previous round's keys are deleted."""
        self._leave(len(self.ranks))
        previous = _rounds[self._name] - 1
        _rounds[self._name] += 1
        for what in self._kinds:  # all ranks have read that round, or they would not be in this one
            if previous >= 0 and self._store.check([key := f"{self._name}/{previous}/{what}/{self.rank}"]):
                self._store.delete_key(key)

    def _leave(self, ranks: int) -> None:
        """Count this rank as one that has left. Rank 0 serves the store and may exit then: it waits for ``ranks``."""
        here = self._store.add(f"{self._prefix}/left", 1)
        if self.rank == 0 and here < ranks:
            ends = time.monotonic() + self.timeout
            while self._store.add(f"{self._prefix}/left", 0) < ranks and time.monotonic() < ends:
                time.sleep(0.01)

    def _key(self, what: str, rank: int) -> str:
        return f"{self._prefix}/{what}/{rank}"

    def _ended(self, missing: list[int], keys: Mapping[int, str]) -> list[int]:
        """Those of ``missing`` whose processes began this round and have ended, or what another rank found of that.

        What is found is left in the store: who finds it ends too, and must not be taken for one that ended first.
        """
        found = f"{self._prefix}/ended"
        if not self._store.check([found]):
            ended = [
                rank
                for rank in missing
                if self._store.check([key := self._key(_PROCESS, rank)])
                and not is_running(self._store.get(key).decode())
                and not self._store.check([keys[rank]])  # it answered in the meantime, and then ended
            ]
            if not ended:
                return []
            self._store.compare_set(found, "", json.dumps(ended))
        known: list[int] = json.loads(self._store.get(found))
        return known

    @contextmanager
    def _reaching_the_store(self) -> Iterator[None]:
        """Raise NoAnswerError where the store is gone: a rank serves it, usually the first one."""
        try:
            yield
        except DistNetworkError as error:
            raise NoAnswerError([self.ranks[0]], ended=True) from error
