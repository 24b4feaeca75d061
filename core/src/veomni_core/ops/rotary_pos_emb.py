"""rotary_pos_emb: ``(q[B, Hq, S, D], k[B, Hk, S, D], cos[B, S, R], sin[B, S, R], unsqueeze_dim=1) -> (q, k)``.

Rotates pairs ``(i, i + R/2)`` of the first ``R`` of ``D`` dimensions by position (Su et al. 2021, in GPT-NeoX's half
layout, as in transformers' Llama). ``full`` has ``R = D``; ``partial`` passes the other ``D - R`` dimensions through.
With ``unsqueeze_dim=2`` the layout is ``[B, S, H, D]``. No gradient reaches ``cos`` and ``sin``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from veomni_core.ops.contract import Contract, Draw, Sample, SampleMaker, Tolerance, leaf


def _rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def full(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """Rotate every dimension of ``q`` and ``k``, rounding each product and the sum to their dtype."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + _rotate_half(q) * sin, k * cos + _rotate_half(k) * sin


def partial(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """Rotate the first ``cos.shape[-1]`` dimensions and pass the others through unchanged."""
    width = cos.shape[-1]
    q_rotated, k_rotated = full(q[..., :width], k[..., :width], cos, sin, unsqueeze_dim)
    return torch.cat((q_rotated, q[..., width:]), dim=-1), torch.cat((k_rotated, k[..., width:]), dim=-1)


def interleaved(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """Rotate pairs of neighbours (Ernie 4.5): of ``cos[B, S, D]`` the first half counts, each entry for one pair."""
    cos, sin = (x[..., : x.shape[-1] // 2].repeat_interleave(2, dim=-1) for x in (cos, sin))
    return pairwise(q, k, cos, sin, unsqueeze_dim)


def pairwise(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """Rotate pairs of neighbours by ``cos[B, S, D]`` that holds each pair's entry twice, side by side (Cohere)."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + _rotate_pairs(q) * sin, k * cos + _rotate_pairs(k) * sin


def interleaved_partial(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """:func:`interleaved` in the first ``cos.shape[-1]`` dimensions (GLM-4); the others pass through unchanged."""
    width = cos.shape[-1]
    turned = interleaved(q[..., :width], k[..., :width], cos, sin, unsqueeze_dim)
    return torch.cat((turned[0], q[..., width:]), dim=-1), torch.cat((turned[1], k[..., width:]), dim=-1)


def deinterleaved(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """:func:`full` after moving even dimensions into the first half and odd ones into the second (DeepSeek-V3).

    Of ``cos[B, S, D]`` the first half counts.
    """
    q, k = (torch.cat((x[..., ::2], x[..., 1::2]), dim=-1) for x in (q, k))
    cos, sin = (x[..., : x.shape[-1] // 2] for x in (cos, sin))
    return half_width(q, k, cos, sin, unsqueeze_dim)


def half_width(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """:func:`full` with ``cos[B, S, D/2]``, which both halves share (gpt-oss)."""
    return full(q, k, torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1), unsqueeze_dim)


def _rotate_pairs(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


def _samples(share: float, copies: int) -> SampleMaker:
    def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
        draw = Draw(device, dtype)

        def angles(batch: int, length: int, head: int) -> tuple[Tensor, Tensor]:
            half = draw.normal(batch, length, int(head * share) // 2, scale=2.0).float()
            both = torch.cat((half,) * copies, dim=-1)
            return both.cos().to(dtype), both.sin().to(dtype)

        def heads(batch: int, count: int, length: int, head: int) -> Tensor:
            return leaf(draw.normal(batch, length, count, head).transpose(1, 2))

        for name, batch, q_heads, k_heads, length, head in (
            ("grouped heads, transposed", 2, 4, 2, 7, 64),
            ("one key head", 1, 3, 1, 33, 128),
            ("one position", 3, 2, 2, 1, 32),
        ):
            yield Sample(
                name,
                (
                    heads(batch, q_heads, length, head),
                    heads(batch, k_heads, length, head),
                    *angles(batch, length, head),
                ),
            )
        yield Sample("angles shared by the batch", (heads(2, 2, 5, 32), heads(2, 2, 5, 32), *angles(1, 5, 32)))
        q, k = leaf(draw.normal(2, 9, 4, 64)), leaf(draw.normal(2, 9, 2, 64))
        yield Sample("sequence before heads", (q, k, *angles(2, 9, 64)), {"unsqueeze_dim": 2})
        q, k = leaf(draw.normal(2, 4, 5, 64)), leaf(draw.normal(2, 1, 5, 64))
        yield Sample("contiguous", (q, k, *angles(2, 5, 64)))

    return samples


VALUES = {
    "float32": Tolerance(element=2e-6, norm=5e-7),
    "bfloat16": Tolerance(element=1.6e-2, norm=4e-3),
    "float16": Tolerance(element=2e-3, norm=5e-4),
}
GRADIENTS = VALUES


def _contract(reference: Callable[..., Any], share: float = 1.0, copies: int = 2) -> Contract:
    samples = _samples(share, copies)
    return Contract("rotary_pos_emb", reference.__name__, reference, samples, VALUES, GRADIENTS)


CONTRACTS = {
    contract.variant: contract
    for contract in (
        _contract(full),
        _contract(partial, share=0.5),
        _contract(interleaved),
        _contract(pairwise),
        _contract(interleaved_partial, share=0.5),
        _contract(deinterleaved),
        _contract(half_width, copies=1),
    )
}
