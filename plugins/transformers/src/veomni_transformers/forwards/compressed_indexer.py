"""What a bound indexer of DeepSeek-V4 runs: its own code up to the scores, and a kernel that chooses.

Its keys are compressed: one for each ``compress_rate`` tokens. A query sees those whose tokens all come before its end,
which is a range, so that no tensor has a number for each pair of a query and a key.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Function = Callable[..., Any]


def compressed_indexer_forward(own: Function, kernel: Function) -> Function:
    """A forward of an indexer whose own forward is ``own``, that chooses compressed keys by ``kernel``."""

    @torch.no_grad()
    def forward(
        self: Any, hidden_states: Tensor, q_residual: Tensor, position_ids: Tensor, *cache: Any, **named_cache: Any
    ) -> Tensor:
        try:
            own(_UpToScores(self), hidden_states, q_residual, position_ids, *cache, **named_cache)
        except _Scored as found:
            query, keys = found.query, found.keys
        weights = self.scorer.weights_proj(hidden_states).float()
        weights = weights * (self.scorer.weights_scaling * self.scorer.softmax_scale)
        stop = ((position_ids + 1) // self.compress_rate).clamp_max(keys.shape[1]).expand(len(query), -1)
        visible = torch.stack([torch.zeros_like(stop), stop], dim=-1).to(torch.int32)
        chosen: Tensor = kernel(query, keys, weights, visible, self.index_topk)
        return chosen.long()

    return forward


class _Scored(Exception):
    """Ends an indexer's own forward where it would score every pair."""

    def __init__(self, query: Tensor, keys: Tensor) -> None:
        super().__init__()
        self.query, self.keys = query, keys


class _UpToScores:
    """Stands for an indexer in its own forward, which ends at its ``scorer``."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def scorer(self, query: Tensor, keys: Tensor, hidden_states: Tensor) -> Tensor:
        raise _Scored(query, keys)
