"""Which rows of one layer go where, and the collectives that bring them there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from veomni_ops.expert_ranks import ExpertRanks


@dataclass(frozen=True)
class Exchange:
    """One layer's rows. Rows to send are sorted by rank, and then by token.

    Attributes:
        index: ``[T, K]``, the chosen experts among those of all ranks.
        ranks: the ranks, and this one's place.
        slots: ``[T, W]``, the row of each token and rank; -1 for none.
        places: ``[S]``, the rank and the token of each row, as ``rank * T + token``; -1 for padding.
        sent: how many rows each rank gets from this one; ``None`` if all get as many.
        received: how many rows this rank gets from each one, likewise.
        rows_received: ``R``.
        overflow: whether a rank would get more rows than it has room for; ``None`` without a bound.
    """

    index: Tensor
    ranks: ExpertRanks
    slots: Tensor
    places: Tensor
    sent: list[int] | None
    received: list[int] | None
    rows_received: int
    overflow: Tensor | None = None

    @classmethod
    def of(cls, top_k_index: Tensor, ranks: ExpertRanks, max_tokens: int = 0) -> Exchange:
        """The rows for these choices. Without ``max_tokens`` ranks tell each other their counts."""
        index = top_k_index.contiguous()
        owner = index.div(ranks.local_experts, rounding_mode="floor")  # [T, K]
        each = torch.arange(ranks.size, device=index.device).view(-1, 1, 1)
        wanted = (owner == each).any(dim=-1)  # [W, T]
        if max_tokens:
            return cls._bounded(index, ranks, wanted, max_tokens)
        counts = wanted.sum(dim=1)  # [W]
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=ranks.group)
        sent, received = torch.stack([counts, theirs]).tolist()  # the layer's one host sync
        places = (wanted.flatten().cumsum(0) - 1).view_as(wanted)  # [W, T]
        slots, places = _both_maps(wanted, places, sum(sent))
        return cls(index, ranks, slots, places, sent, received, sum(received))

    @classmethod
    def _bounded(cls, index: Tensor, ranks: ExpertRanks, wanted: Tensor, bound: int) -> Exchange:
        """``bound`` rows for every rank. Where a rank would get more, all ranks raise when the rows have arrived."""
        overflow = (wanted.sum(dim=1) > bound).any()
        nth = wanted.cumsum(dim=1) - 1  # [W, T]
        first = torch.arange(ranks.size, device=index.device).unsqueeze(1) * bound  # [W, 1]
        rows = ranks.size * bound
        slots, places = _both_maps(wanted & (nth < bound), nth + first, rows)
        return cls(index, ranks, slots, places, None, None, rows, overflow)

    @property
    def rows_sent(self) -> int:
        """``S``."""
        return len(self.places)

    def there(self, rows: Tensor) -> Tensor:
        """Rows to send ``[S, ...]`` become the rows that the other ranks have sent ``[R, ...]``."""
        return self._exchanged(rows, self.rows_received, self.received, self.sent)

    def back(self, rows: Tensor) -> Tensor:
        """The other way."""
        return self._exchanged(rows, self.rows_sent, self.sent, self.received)

    def _exchanged(self, rows: Tensor, count: int, incoming: list[int] | None, outgoing: list[int] | None) -> Tensor:
        result = rows.new_empty(count, *rows.shape[1:])
        group: Any = self.ranks.group
        dist.all_to_all_single(result, rows, incoming, outgoing, group=group)
        return result


def _both_maps(wanted: Tensor, places: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """``slots[T, W]`` and its inverse ``places[rows]``, see :class:`Exchange`.

    Args:
        wanted: ``[W, T]``, whether a token goes to a rank.
        places: ``[W, T]``, in which row, where it is wanted.
        rows: how many rows there are.
    """
    slots = torch.where(wanted, places, -1)
    inverse = slots.new_full((rows + 1,), -1)  # what is not wanted goes to the last entry, which is cut off
    numbers = torch.arange(slots.numel(), device=slots.device)
    inverse.scatter_(0, torch.where(wanted, places, rows).flatten(), numbers)
    return slots.t().contiguous(), inverse[:rows]
