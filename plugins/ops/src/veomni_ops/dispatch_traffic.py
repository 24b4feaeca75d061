"""How many rows and bytes a layer's token dispatch moves: counted from a routing, and expected of a random one.

``engine`` is transformers' ``AllToAllEP``, a row for each choice; ``alltoall_dedup`` is a row for each token and rank.
Rows that stay on their rank are not counted, and neither is backward, which moves the same rows once more each way.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import comb

from torch import Tensor

BY_CHOICE, BY_RANK = "engine", "alltoall_dedup"
_COUNT_BYTES = 8  # ranks tell each other counts as int64
_ID_BYTES = 4


@dataclass(frozen=True)
class DispatchLayout:
    """What a layer's traffic depends on besides the routing.

    Args:
        ranks: over how many ranks the experts are sharded.
        experts: how many experts there are on all ranks.
        choices: how many experts a token chooses.
        hidden: the width of a token.
        item_bytes: of a hidden value and of a routing weight.

    Example:
        >>> layout = DispatchLayout(ranks=4, experts=128, choices=8, hidden=2048)
        >>> layout.local_experts
        32
    """

    ranks: int
    experts: int
    choices: int
    hidden: int
    item_bytes: int = 2

    @property
    def local_experts(self) -> int:
        """How many experts each rank holds."""
        return self.experts // self.ranks

    def bytes_of(self, way: str, rows: float) -> float:
        """The bytes of one forward for ``rows`` that leave a rank: there, back, and the counts."""
        values = self.hidden * self.item_bytes
        if way == BY_CHOICE:
            return rows * 2 * values + _COUNT_BYTES * self.local_experts * (self.ranks - 1)
        row = _aligned(values) + _aligned(self.choices * self.item_bytes) + _aligned(self.choices * _ID_BYTES)
        return rows * (row + values) + _COUNT_BYTES * (self.ranks - 1)


def rows_sent(way: str, top_k_index: Tensor, rank: int, layout: DispatchLayout) -> list[int]:
    """How many rows ``rank`` sends to each other one, for its tokens' choices ``top_k_index[T, K]``.

    Args:
        way: :data:`BY_CHOICE` or :data:`BY_RANK`.
        top_k_index: the rank's own choices.
        rank: the rank; its own rows never leave it, and are counted as 0.
        layout: the layer.

    Example:
        >>> layout = DispatchLayout(ranks=2, experts=4, choices=2, hidden=8)
        >>> import torch
        >>> index = torch.tensor([[2, 3], [1, 2]])
        >>> [rows_sent(way, index, 0, layout) for way in (BY_CHOICE, BY_RANK)]
        [[0, 3], [0, 2]]
    """
    owner = top_k_index.div(layout.local_experts, rounding_mode="floor")
    counts = []
    for each in range(layout.ranks):
        chosen = owner == each
        counts.append(int((chosen if way == BY_CHOICE else chosen.any(dim=-1)).sum()) if each != rank else 0)
    return counts


def expected_rows(way: str, layout: DispatchLayout) -> float:
    """How many rows a token sends to other ranks on average, if it chooses distinct experts at random.

    It misses a given rank with the probability that all of its choices are among the other ranks' experts.

    Example:
        >>> layout = DispatchLayout(ranks=4, experts=128, choices=8, hidden=2048)
        >>> [round(expected_rows(way, layout), 2) for way in (BY_CHOICE, BY_RANK)]
        [6.0, 2.72]
    """
    others = layout.ranks - 1
    if way == BY_CHOICE:
        return layout.choices * others / layout.ranks
    missed = comb(layout.experts - layout.local_experts, layout.choices) / comb(layout.experts, layout.choices)
    return others * (1 - missed)


def _aligned(length: int) -> int:
    """A row's parts start at multiples of 16 bytes."""
    return -(-length // 16) * 16
