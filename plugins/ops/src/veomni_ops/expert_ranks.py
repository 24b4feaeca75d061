"""What a kernel of token_dispatch is given besides tokens: this rank's experts, and the ranks that share a layer's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

Experts = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class ExpertRanks:
    """The ranks that share a layer's experts, and this rank's place among them.

    Args:
        group: the ``torch.distributed`` process group of these ranks.
        size: how many they are.
        rank: this rank's number in the group.
        local_experts: how many experts each rank holds.

    Example:
        >>> ranks = ExpertRanks(group=None, size=4, rank=1, local_experts=32)
        >>> ranks.size * ranks.local_experts
        128
    """

    group: Any
    size: int
    rank: int
    local_experts: int
