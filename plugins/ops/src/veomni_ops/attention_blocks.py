"""Blocks of attention: what some queries see of some keys, with the log-sum-exp of their scores.

Ring attention computes a query's output from several blocks, which are merged by their log-sum-exp. In backward each
block's gradients follow from the output and the log-sum-exp of *all* keys. An attention function whose library gives
both has them as its attribute ``blocks`` (:class:`Blocks`); :data:`TORCH` has them for torch's own attention.

Shapes: B rows, S queries, L keys, Hq query heads, Hk key heads, D width of queries and keys, Dv width of values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from veomni_ops.contract import compute_dtype

_MOST_SCORES = 2**26  # at once, in the exact computation
_WIDEST, _MULTIPLE = 256, 8  # heads of torch's FlashAttention
# cuDNN's attention makes a plan for each shape anew, which packed sequences of any length would wait for.
_CUDNN_LENGTHS = 1024  # of which those of blocks are multiples


@dataclass(frozen=True)
class Block:
    """Options of a block. The last query is aligned with the last key: query i is at key ``p = i + L - S``.

    Attributes:
        scaling: multiplies the scores.
        softcap: bounds the scores; 0 for none.
        causal: whether the query sees no key behind p.
        left: how many keys before p it sees; ``None`` for all. Each query sees a key, and none is before all keys.

    Example:
        >>> Block(scaling=0.125, causal=True, left=511)  # a window of 512 keys, the query's own included
        Block(scaling=0.125, softcap=0.0, causal=True, left=511)
    """

    scaling: float
    softcap: float = 0.0
    causal: bool = False
    left: int | None = None


class Blocks(Protocol):
    """How one library computes a block.

    Example:
        >>> blocks: Blocks = TORCH
    """

    def attend(self, query: Tensor, key: Tensor, value: Tensor, block: Block) -> tuple[Tensor, Tensor]:
        """``query[B, S, Hq, D]``, ``key[B, L, Hk, D]``, ``value[B, L, Hk, Dv]`` to ``output[B, S, Hq, Dv]`` and the
        log-sum-exp ``[B, Hq, S]``, in float32 or wider."""

    def gradients(
        self, upstream: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, block: Block
    ) -> tuple[Tensor, ...]:
        """The block's share of the gradients of query, key and value. ``output``, ``lse`` and ``upstream`` (of output)
        are those of attention over all keys."""


class TorchBlocks:
    """By cuDNN or torch's FlashAttention on CUDA, for heads of 16 bits without a softcap; else exact, in pieces.

    Example:
        >>> query, key = torch.zeros(1, 2, 4, 8), torch.zeros(1, 3, 2, 8)  # two queries after the first of three keys
        >>> output, lse = TORCH.attend(query, key, key, Block(scaling=1.0, causal=True))
        >>> output.shape, lse[0, 0].exp().round()  # how many keys each query sees
        (torch.Size([1, 2, 4, 8]), tensor([2., 3.]))
    """

    def attend(self, query: Tensor, key: Tensor, value: Tensor, block: Block) -> tuple[Tensor, Tensor]:
        if _is_cudnn(query, key, value, block):
            swapped = (each.transpose(1, 2) for each in (query, key, value))
            output, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
                *swapped, None, True, 0.0, block.causal, scale=block.scaling
            )
            return output.transpose(1, 2), lse.flatten(2)  # [B, H, S, 1]
        if _is_fused(query, value, block):
            heads = _padded(query, key, value)
            sizes = (None, None, query.shape[1], key.shape[1], 0.0, block.causal, False)
            output, lse, *_ = torch.ops.aten._flash_attention_forward(*heads, *sizes, **_keywords(block))
            return output[..., : value.shape[-1]], lse
        parts = list(self._exact(query, key, value, block))
        return torch.cat([output for output, _ in parts], 1), torch.cat([lse for _, lse in parts], 2)

    def gradients(
        self, upstream: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, block: Block
    ) -> tuple[Tensor, ...]:
        if _is_cudnn(query, key, value, block):
            # torch (2.11) keeps cuDNN's plan by the layouts of query, key and value alone.
            up, out = (each.contiguous().transpose(1, 2) for each in (upstream, output))
            swapped = (each.transpose(1, 2) for each in (query, key, value))
            unused = torch.zeros(2, dtype=torch.int64, device=query.device).unbind()  # of dropout
            lengths = (query.shape[1], key.shape[1])
            found = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
                *(up, *swapped, out, lse.contiguous().unsqueeze(-1), *unused, None, None, None, *lengths),
                *(0.0, block.causal),
                scale=block.scaling,
            )
            return tuple(each.transpose(1, 2) for each in found)
        if _is_fused(query, value, block):
            upstream, *heads = _padded(upstream, query, key, value, output)
            sizes = (lse.contiguous(), None, None, query.shape[1], key.shape[1], 0.0, block.causal)
            unused = torch.zeros(2, dtype=torch.uint64, device=query.device), query.new_empty(0)  # of dropout
            found = torch.ops.aten._flash_attention_backward(upstream, *heads, *sizes, *unused, **_keywords(block))
            return tuple(each[..., : of.shape[-1]] for each, of in zip(found, (query, key, value), strict=True))
        wide = compute_dtype(query)
        keys, values = key.to(wide), value.to(wide)
        of_query, of_key, of_value = [], torch.zeros_like(keys), torch.zeros_like(values)
        for rows in _pieces(query, key):
            queries, up, out = (_grouped(each[:, rows].to(wide), key) for each in (query, upstream, output))
            scores, capped = _scores(queries, keys, rows, query.shape[1], block)
            weights = (scores - lse[:, :, rows].to(wide).unflatten(1, (key.shape[2], -1)).unsqueeze(-1)).exp()
            of_value += torch.einsum("bhgsl,bshgd->blhd", weights, up)
            of_weights = torch.einsum("bshgd,blhd->bhgsl", up, values)
            of_scores = weights * (of_weights - (up * out).sum(-1).permute(0, 2, 3, 1).unsqueeze(-1))
            if block.softcap:
                of_scores = of_scores * (1 - (capped / block.softcap).square())
            of_scores = of_scores * block.scaling
            of_query.append(torch.einsum("bhgsl,blhd->bshgd", of_scores, keys).flatten(2, 3))
            of_key += torch.einsum("bhgsl,bshgd->blhd", of_scores, queries)
        return torch.cat(of_query, 1).to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype)

    def _exact(self, query: Tensor, key: Tensor, value: Tensor, block: Block) -> Iterator[tuple[Tensor, Tensor]]:
        wide = compute_dtype(query)
        keys, values = key.to(wide), value.to(wide)
        for rows in _pieces(query, key):
            scores, _ = _scores(_grouped(query[:, rows].to(wide), key), keys, rows, query.shape[1], block)
            lse = scores.logsumexp(-1, keepdim=True)
            output = torch.einsum("bhgsl,blhd->bshgd", (scores - lse).exp(), values)
            yield output.flatten(2, 3).to(query.dtype), lse.squeeze(-1).flatten(1, 2)


TORCH = TorchBlocks()


def _pieces(query: Tensor, key: Tensor) -> Iterator[slice]:
    """Slices of the queries, each with at most ``_MOST_SCORES`` scores, or of one query."""
    length = query.shape[1]
    step = max(_MOST_SCORES // max(query.shape[0] * query.shape[2] * key.shape[1], 1), 1)
    return (slice(first, min(first + step, length)) for first in range(0, length, step))


def _grouped(heads: Tensor, key: Tensor) -> Tensor:
    """``[B, S, Hq, D]`` by the key head that they share: ``[B, S, Hk, Hq / Hk, D]``."""
    return heads.unflatten(2, (key.shape[2], -1))


def _scores(queries: Tensor, keys: Tensor, rows: slice, length: int, block: Block) -> tuple[Tensor, Tensor]:
    """The scores ``[B, Hk, Hq / Hk, s, L]`` of these ``rows`` of queries, and the same before what they don't see."""
    scores = torch.einsum("bshgd,blhd->bhgsl", queries, keys) * block.scaling
    if block.softcap:
        scores = block.softcap * torch.tanh(scores / block.softcap)
    place = torch.arange(keys.shape[1], device=keys.device)
    own = torch.arange(rows.start, rows.stop, device=keys.device).unsqueeze(-1) + keys.shape[1] - length
    unseen = torch.zeros_like(place > own)
    if block.causal:
        unseen |= place > own
    if block.left is not None:
        unseen |= place < own - block.left
    return scores.masked_fill(unseen, float("-inf")), scores


def _is_fused(query: Tensor, value: Tensor, block: Block) -> bool:
    fits = query.element_size() == 2 and max(query.shape[-1], value.shape[-1]) <= _WIDEST
    return query.is_cuda and fits and not block.softcap


def _is_cudnn(query: Tensor, key: Tensor, value: Tensor, block: Block) -> bool:
    """Whether cuDNN computes this block. It has no windows, and aligns the first query with the first key."""
    lengths = query.shape[1], key.shape[1]
    if not _is_fused(query, value, block) or block.left is not None or (block.causal and lengths[0] != lengths[1]):
        return False
    q, k, v = (each.transpose(1, 2) for each in (query, key, value))
    call = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, block.causal, q.shape[1] != k.shape[1])
    return not any(length % _CUDNN_LENGTHS for length in lengths) and torch.backends.cuda.can_use_cudnn_attention(call)


def _padded(*heads: Tensor) -> tuple[Tensor, ...]:
    """All heads of one width that torch's FlashAttention takes, in memory that it reads."""
    width = max(each.shape[-1] for each in heads)
    width += -width % _MULTIPLE
    widened = (pad(each, (0, width - each.shape[-1])) if each.shape[-1] < width else each for each in heads)
    return tuple(each if each.stride(-1) == 1 else each.contiguous() for each in widened)


def _keywords(block: Block) -> dict[str, Any]:
    left = -1 if block.left is None else block.left
    return {"scale": block.scaling, "window_size_left": left, "window_size_right": 0 if block.causal else -1}
