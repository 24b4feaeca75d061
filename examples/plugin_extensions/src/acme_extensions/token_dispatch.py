"""token_dispatch: a kernel that brings tokens to the ranks of their experts, and the results back.

``T`` tokens of this rank, ``K`` choices per token, ``H`` hidden size.
"""

from __future__ import annotations

from torch import Tensor

from veomni_core.authoring import Kernel
from veomni_ops.expert_ranks import ExpertRanks
from veomni_ops.token_dispatch import exchanged


def kernel(hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor, experts: Kernel, ranks: ExpertRanks) -> Tensor:
    """The contract's own exchange, in the place of a library's: a buffer of DeepEP, or symmetric memory."""
    return exchanged(hidden, top_k_index, top_k_weights, experts, ranks)
