"""The masks of npu_fusion_attention by sparse_mode: true is what takes no part."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from npu_sim.operators.limits import require, require_dtype

NAME = "npu_fusion_attention"
DEFAULT, ALL, LEFT_UP_CAUSAL, RIGHT_DOWN_CAUSAL = 0, 1, 2, 3
COMPRESSED = 2048  # the side of the one triangle that stands for every causal mask


def hidden(
    atten_mask: Tensor | None, sparse_mode: int, pre_tockens: int, next_tockens: int, scores: Tensor
) -> Tensor | None:
    """What of ``scores`` [B, N, Sq, Skv] is masked; None where nothing is. Modes 0 to 3 are simulated."""
    require(DEFAULT <= sparse_mode <= RIGHT_DOWN_CAUSAL, f"{NAME}: sparse_mode {sparse_mode} is not simulated")
    if atten_mask is None:
        return None  # the documentation: without a mask, sparse_mode and both ranges have no effect
    require_dtype(NAME, "atten_mask", atten_mask, (torch.bool, torch.uint8))
    queries, keys = scores.shape[-2:]
    ahead = torch.arange(keys) - torch.arange(queries).unsqueeze(1)
    if sparse_mode in (LEFT_UP_CAUSAL, RIGHT_DOWN_CAUSAL):
        _require_compressed(atten_mask)
        return ahead > (keys - queries if sparse_mode == RIGHT_DOWN_CAUSAL else 0)
    mask = _dense(atten_mask.bool(), scores)
    return mask if sparse_mode == ALL else mask | (ahead > next_tockens) | (-ahead > pre_tockens)


def _dense(mask: Tensor, scores: Tensor) -> Tensor:
    batch, heads, queries, keys = scores.shape
    if mask.dim() == 2:
        require(
            mask.shape[0] >= queries and mask.shape[1] >= keys,
            f"{NAME}: atten_mask {tuple(mask.shape)} is smaller than {queries} queries by {keys} keys",
        )
        return mask[:queries, :keys]
    allowed = [(*leading, queries, keys) for leading in ((batch, heads), (batch, 1), (1, 1))]
    require(
        tuple(mask.shape) in allowed,
        f"{NAME}: atten_mask must have one of the shapes {allowed}, or two axes, but got {tuple(mask.shape)}",
    )
    return mask


def _require_compressed(mask: Tensor) -> None:
    require(
        tuple(mask.shape) == (COMPRESSED, COMPRESSED) and torch.equal(mask.bool(), _compressed()),
        f"{NAME}: sparse modes 2 and 3 take the {COMPRESSED} x {COMPRESSED} mask that is true above its diagonal",
    )


@functools.cache
def _compressed() -> Tensor:
    return torch.ones(COMPRESSED, COMPRESSED, dtype=torch.bool).triu(1)
