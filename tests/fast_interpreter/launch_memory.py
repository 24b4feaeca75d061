"""Which bytes a launch in Triton's interpreter reads and writes."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Bytes:
    """Some bytes of a launch's storages: by storage, their places."""

    places: tuple[tuple[int, Any], ...]

    @classmethod
    def flagged(cls, flags: dict[tuple[int, int], Any], memories: list[Any]) -> Bytes:
        """Those of elements whose first byte is flagged; ``flags`` are by storage and element size."""
        of_storage: dict[int, Any] = {}
        for (storage, size), firsts in flags.items():
            bytes_ = of_storage.setdefault(storage, np.zeros(memories[storage].nbytes, dtype=bool))
            starts = np.flatnonzero(firsts)
            for byte in range(size):
                bytes_[starts + byte] = True
        return cls(tuple((storage, _places(of_storage[storage])) for storage in sorted(of_storage)))

    def values(self, memories: list[Any]) -> list[Any]:
        return [memories[storage][places].copy() for storage, places in self.places]

    def digest(self, memories: list[Any]) -> bytes:
        digest = hashlib.blake2b(digest_size=16)
        for storage, places in self.places:
            digest.update(memories[storage][places].tobytes())
        return digest.digest()


@dataclass(frozen=True)
class Written:
    """The bytes that a launch wrote, and their values."""

    bytes: Bytes
    values: list[Any]

    def again(self, memories: list[Any]) -> None:
        for (storage, places), values in zip(self.bytes.places, self.values, strict=True):
            memories[storage][places] = values


class Watch:
    """Notes which storages a launch reads, and where it writes."""

    def __init__(self, memories: list[Any]) -> None:
        bounds = sorted((each.ctypes.data, each.ctypes.data + each.nbytes, at) for at, each in enumerate(memories))
        self._starts = [start for start, _, _ in bounds]
        self._ends = [end for _, end, _ in bounds]
        self._storages = [at for _, _, at in bounds]
        overlap = any(end > start for end, start in zip(self._ends, self._starts[1:], strict=False))
        self.is_closed = not overlap  # it touched nothing else so far
        self.read: dict[tuple[int, int], Any] = {}  # by storage and element size: flags of the elements' first bytes
        self.written: dict[tuple[int, int], Any] = {}
        self._sizes = [each.nbytes for each in memories]

    def note(self, flags: dict[tuple[int, int], Any], addresses: Any, mask: Any, size: int) -> None:
        """Flag the elements that an access touches."""
        if not self.is_closed:
            return
        addresses = addresses[mask]
        if not addresses.size:
            return
        first, last = int(addresses.min()), int(addresses.max())
        at = bisect_right(self._starts, first) - 1
        if at < 0 or last + size > self._ends[at]:
            self.is_closed = False
            return
        key = self._storages[at], size
        if key not in flags:
            flags[key] = np.zeros(self._sizes[key[0]], dtype=bool)
        flags[key][addresses - np.uint64(self._starts[at])] = True


def _places(flagged: Any) -> Any:
    """The places of what is flagged: a slice if they are in a line."""
    places = np.flatnonzero(flagged)
    if places.size and places[-1] - places[0] + 1 == places.size:
        return slice(int(places[0]), int(places[-1]) + 1)
    return places
