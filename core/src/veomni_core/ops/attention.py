"""attention: softmax attention with the signature of transformers' ``AttentionInterface``.

``(module, query[B, Hq, S, D], key[B, Hk, L, D], value[B, Hk, L, D], attention_mask, scaling=None, dropout=0.0, ...)
-> (output[B, S, Hq, D], weights or None)``. ``module`` holds ``num_key_value_groups``, ``is_causal`` and ``training``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from veomni_core.ops.contract import Contract, Draw, Sample, Tolerance, compute_dtype, leaf


@dataclass(frozen=True)
class AttentionModule:
    """What an attention kernel reads of the module that calls it."""

    num_key_value_groups: int
    is_causal: bool = True
    training: bool = True


def standard(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """``softmax(scaling * query @ key.T + mask) @ value``, with the softmax in float32.

    Key and value heads are shared by groups of query heads. A boolean mask keeps what is true, another one is added.
    Without a mask the attention is causal where the module says so.
    """
    key = key.repeat_interleave(module.num_key_value_groups, dim=1)
    value = value.repeat_interleave(module.num_key_value_groups, dim=1)
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = scores.to(compute_dtype(query))
    if attention_mask is None and module.is_causal and query.shape[2] > 1:
        attention_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attention_mask is not None:
        if attention_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attention_mask, float("-inf"))
        else:
            scores = scores + attention_mask.to(scores.dtype)
    weights = scores.softmax(dim=-1).to(query.dtype)
    return (weights @ value).transpose(1, 2).contiguous(), None


def _samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    draw = Draw(device, dtype)

    def heads(batch: int, q_heads: int, k_heads: int, length: int, head: int) -> tuple[Tensor, ...]:
        shapes = (q_heads, k_heads, k_heads)
        return tuple(leaf(draw.normal(batch, length, count, head).transpose(1, 2)) for count in shapes)

    grouped, plain = AttentionModule(2), AttentionModule(1)
    yield Sample("causal, grouped heads", (grouped, *heads(2, 4, 2, 17, 32), None))
    yield Sample("given scaling", (plain, *heads(1, 2, 2, 9, 64), None), {"scaling": 0.25})
    allowed = torch.ones(2, 1, 12, 12, dtype=torch.bool, device=device).tril()
    allowed[1, :, :, 8:] = False
    yield Sample("boolean mask", (grouped, *heads(2, 4, 2, 12, 32), allowed))
    added = torch.zeros(2, 1, 12, 12, device=device, dtype=dtype).masked_fill(~allowed, torch.finfo(dtype).min)
    yield Sample("added mask", (grouped, *heads(2, 4, 2, 12, 32), added))
    not_causal = AttentionModule(1, is_causal=False)
    yield Sample("not causal", (not_causal, *heads(2, 2, 2, 11, 32), None))
    query, *_ = heads(2, 2, 2, 1, 32)
    _, key, value = heads(2, 2, 2, 6, 32)
    yield Sample("one query of many keys", (plain, query, key, value, None))


VALUES = {
    "float32": Tolerance(element=2e-5, norm=4e-6),
    "bfloat16": Tolerance(element=4e-2, norm=1e-2),
    "float16": Tolerance(element=5e-3, norm=1.3e-3),
}
GRADIENTS = {
    "float32": Tolerance(element=4e-5, norm=1e-5),
    "bfloat16": Tolerance(element=8e-2, norm=2e-2),
    "float16": Tolerance(element=1e-2, norm=2.5e-3),
}

CONTRACTS = {
    "standard": Contract(
        "attention", "standard", standard, _samples, VALUES, GRADIENTS, primary=lambda result: (result[0],)
    )
}
