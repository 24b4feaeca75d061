"""dsa_indexer in plain PyTorch: a block of queries at a time, and for it the scores of a block of keys at a time.

Memory is linear in the number of keys: the scores of all heads exist for one block, their sums for a block of queries.
"""

from __future__ import annotations

import torch
from torch import Tensor

from veomni_core.kernels import autocast_off, product_operands
from veomni_ops.contract import compute_dtype
from veomni_ops.dsa_indexer import check_call
from veomni_ops.visible_keys import as_mask

_CPU_BLOCK, _ACCELERATOR_BLOCK = 1 << 20, 1 << 26  # numbers of a block's largest tensor
_KEYS = 4096


@torch.no_grad()
def standard(query: Tensor, key: Tensor, weights: Tensor, visible: Tensor, top_k: int) -> Tensor:
    """int32 ``[B, T, min(top_k, S)]``: of each query the chosen keys, rising, and then -1 where it sees fewer.

    Raises:
        ValueError: shapes or dtypes don't fit together.
        TypeError: query and key differ in dtype without autocast.
    """
    query, key = product_operands("torch", query=query, key=key)
    check_call(query, key, weights, visible, top_k)
    batch, length, heads, _ = query.shape
    keys = key.shape[1]
    top_k = min(top_k, keys)
    found = torch.empty(batch, length, top_k, dtype=torch.int32, device=query.device)
    budget = _CPU_BLOCK if query.device.type == "cpu" else _ACCELERATOR_BLOCK
    size = max(1, budget // max(1, batch * max(heads * min(keys, _KEYS), keys)))
    wide = compute_dtype(query)
    with autocast_off(query.device.type):
        for first in range(0, length, size):
            rows = slice(first, first + size)
            scores = [
                _scores(query[:, rows].to(wide), key[:, start : start + _KEYS].to(wide), weights[:, rows].to(wide))
                for start in range(0, keys, _KEYS)
            ]
            if scores:
                found[:, rows] = _highest(torch.cat(scores, dim=-1), as_mask(visible[:, rows], keys), top_k)
    return found


def _scores(query: Tensor, key: Tensor, weights: Tensor) -> Tensor:
    products = (query.flatten(1, 2) @ key.transpose(1, 2)).relu_().unflatten(1, query.shape[1:3])
    return (weights.unsqueeze(2) @ products).squeeze(2)


def _highest(scores: Tensor, seen: Tensor, top_k: int) -> Tensor:
    """The places of the highest scores among those that are ``seen``, rising, then -1; of equal ones the first."""
    scores = scores.nan_to_num(nan=torch.inf).masked_fill_(~seen, -torch.inf)
    least = scores.topk(top_k, dim=-1, sorted=False)[0].amin(-1, keepdim=True)
    higher = (scores > least) & seen
    equal = (scores == least) & seen  # which of them a top k takes is left open, so they are counted off
    chosen = higher | (equal & (equal.cumsum(-1) <= top_k - higher.sum(-1, keepdim=True)))
    keys = scores.shape[-1]
    places = torch.where(chosen, torch.arange(keys, device=scores.device), keys)
    rising = places.topk(top_k, dim=-1, largest=False, sorted=True)[0]
    return torch.where(rising == keys, -1, rising).to(torch.int32)
