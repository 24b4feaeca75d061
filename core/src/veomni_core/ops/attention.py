"""attention: softmax attention with the signature of transformers' ``AttentionInterface``.

``(module, query[B, Hq, S, D], key[B, Hk, L, D], value[B, Hk, L, Dv], attention_mask, scaling=None, dropout=0.0, ...)
-> (output[B, S, Hq, Dv], weights or None)``. ``module`` has the attributes ``num_key_value_groups``, ``training`` and
``is_causal``; an argument ``is_causal`` overrides the latter.

Whatever not every kernel computes is a feature. A kernel declares the features that it computes in its spec, and raises
for calls that need others:

- ``dense_mask``: ``attention_mask[B, 1 or Hq, S, L]``, boolean (True is kept) or added to the scores;
- ``padding_mask``: ``attention_mask[B, L]``, False at padding. With a causal mask, the output of a query at padding is
  zero;
- ``sliding_window``: without a dense mask, ``sliding_window=W`` lets a query see its last W keys, including its own;
- ``packed``: varlen attention. ``cu_seq_lens_q`` and ``cu_seq_lens_k`` (int32 ``[sequences + 1]``) delimit the
  sequences in a batch of one;
- ``softcap``: scores become ``softcap * tanh(scores / softcap)`` before the mask;
- ``softcap_by_lengths``: a softcap with ``padding_mask`` or ``packed``;
- ``sinks``: ``s_aux[Hq]`` is one more score in each row's softmax, whose weight is then dropped;
- ``query_sinks``: the same with a score per query, ``sinks[B, Hq, S, 1]``;
- ``position_bias``: ``position_bias[1 or B, Hq, S, L]`` is added to the scores, and gets a gradient (T5);
- ``chosen_keys``: sparse attention. Of the keys that it may see, a query sees only ``indices[B, S, chosen]``, or the
  blocks in ``block_indices``, whose size the module knows. The contract has no sample of ``block_indices``;
- ``dropout``: dropout of the attention weights;
- ``wide_heads``: a head dimension above 256; ``odd_heads``: a head dimension that is no multiple of 8.

The kind of mask that transformers builds for a kernel is a feature too, one of :data:`MASK_FEATURES`: ``sdpa_mask``
(boolean; left out where ``is_causal`` says the same), ``flash_attention_mask`` (of padding, or none) or
``flex_attention_mask`` (a ``BlockMask``). At a site where such masks don't express what the eager mask does, the plan
refuses the kernels that take them.

Only some models pass the options in :data:`FEATURES_OF_OPTIONS`. A kernel passes those that it doesn't compute to
:func:`refuse`. A site's ``sizes``: ``head_dim``, every width of its queries' and values' heads.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from veomni_core.ops.attention_options import combined_options
from veomni_core.ops.contract import Contract, Draw, Sample, Tolerance, compute_dtype, leaf

# By the attention interface of transformers whose masks the kernel takes.
MASK_FEATURES = {
    "sdpa": "sdpa_mask",
    "flash_attention": "flash_attention_mask",
    "flex_attention": "flex_attention_mask",
}
FEATURES_OF_OPTIONS = {
    "position_bias": "position_bias",
    "indices": "chosen_keys",
    "block_indices": "chosen_keys",
    "sinks": "query_sinks",
}


@dataclass(frozen=True)
class AttentionModule:
    """The attributes that an attention kernel reads from its calling module; samples pass this instead of one."""

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
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    indices: Tensor | None = None,
    sinks: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """``softmax(scaling * query @ key.T + mask) @ value``, with the softmax in float32.

    Each key and value head is shared by ``module.num_key_value_groups`` query heads. A boolean mask keeps what is True;
    any other mask is added. Without a dense mask, attention is causal if ``is_causal`` (or else the module's attribute)
    is True; the causal mask is aligned at the bottom right, so the last query sees all keys.
    """
    key = key.repeat_interleave(module.num_key_value_groups, dim=1)
    value = value.repeat_interleave(module.num_key_value_groups, dim=1)
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = scores.to(compute_dtype(query))
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if position_bias is not None:
        scores = scores + position_bias
    if indices is not None:
        chosen = torch.zeros_like(scores[:, 0], dtype=torch.bool).scatter(-1, indices, True)
        scores = scores.masked_fill(~chosen[:, None], float("-inf"))
    padding = None
    causal = module.is_causal if is_causal is None else is_causal
    if attention_mask is None or attention_mask.dim() == 2:
        padding = attention_mask
        attention_mask = visible(scores, causal, sliding_window, cu_seq_lens_q, cu_seq_lens_k)
        if padding is not None:
            kept = padding.bool()[:, None, None, :]
            if causal:  # a query at padding may see no key, and its softmax would be NaN; its output is zeroed below
                kept = kept | ~padding.bool()[:, None, -scores.shape[-2] :, None]
            attention_mask = attention_mask & kept
    if attention_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attention_mask, float("-inf"))
    else:
        scores = scores + attention_mask.to(scores.dtype)
    if s_aux is not None:
        sinks = s_aux[None, :, None, None].expand(*scores.shape[:-1], 1)
    if sinks is not None:
        weights = torch.cat([scores, sinks.to(scores.dtype)], dim=-1).softmax(dim=-1)[..., :-1].to(query.dtype)
    else:
        weights = scores.softmax(dim=-1).to(query.dtype)
    output = (weights @ value).transpose(1, 2).contiguous()
    if padding is not None and causal:
        output = output * padding.to(output.dtype)[:, -output.shape[1] :, None, None]
    return output, None


def refuse(kernel: str, options: Mapping[str, Any]) -> None:
    """Raise instead of silently ignoring options that the kernel does not compute.

    Raises:
        ValueError: ``options`` has some of :data:`FEATURES_OF_OPTIONS`; the message names ``kernel`` and the options.
    """
    if asked := [f"`{name}`" for name in FEATURES_OF_OPTIONS if options.get(name) is not None]:
        raise ValueError(f"{kernel} does not compute {' and '.join(asked)}; choose eager")


def visible(
    scores: Tensor, causal: bool, window: int | None, query_bounds: Tensor | None, key_bounds: Tensor | None
) -> Tensor:
    """The mask ``[S, L]``, True where a query sees a key. A sequence's last query is aligned with its last key."""
    ends = []
    numbers = []
    for length, bounds in zip(scores.shape[-2:], (query_bounds, key_bounds), strict=True):
        positions = torch.arange(length, device=scores.device)
        bounds = positions.new_tensor([0, length]) if bounds is None else bounds.long()
        numbers.append(torch.bucketize(positions, bounds[1:], right=True))
        ends.append(bounds[1:][numbers[-1]] - positions)
    ahead = ends[0][:, None] - ends[1]
    kept = numbers[0][:, None] == numbers[1]
    kept = kept & (ahead <= 0) if causal else kept
    return kept if window is None else kept & (ahead.abs() < window)


def _heads(draw: Draw, batch: int, q_heads: int, k_heads: int, length: int, head: int) -> tuple[Tensor, ...]:
    shapes = (q_heads, k_heads, k_heads)
    return tuple(leaf(draw.normal(batch, length, count, head).transpose(1, 2)) for count in shapes)


def _packed(lengths: Tensor, key_lengths: Tensor | None = None) -> dict[str, Any]:
    """The options of a varlen call with sequences of these lengths; ``key_lengths`` if the keys have other lengths."""
    pairs = (("q", lengths), ("k", lengths if key_lengths is None else key_lengths))
    bounds = {name: F.pad(each.cumsum(0), (1, 0)).int() for name, each in pairs}
    return {
        **{f"cu_seq_lens_{name}": bounds[name] for name, _ in pairs},
        **{f"max_length_{name}": int(each.max()) for name, each in pairs},
    }


def _beyond_a_tile(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    draw = Draw(device, dtype, seed=2)
    grouped = AttentionModule(2)

    def inputs(mask: Tensor | None = None, batch: int = 1, length: int = 150) -> tuple[Any, ...]:
        return (grouped, *_heads(draw, batch, 4, 2, length, 32), mask)

    yield Sample("past 128 keys", inputs())
    yield Sample("past 64 in a head", (grouped, *_heads(draw, 1, 2, 1, 37, 128), None))
    yield Sample("not causal, past 128 keys", inputs(), {"is_causal": False})
    unpadded = torch.ones(2, 150, dtype=torch.bool, device=device)
    unpadded[1, 131:] = False
    yield Sample("long padding mask", inputs(unpadded, batch=2), needs=("padding_mask",))
    allowed = unpadded[:, None, None, :] & torch.ones(150, 150, dtype=torch.bool, device=device).tril()
    yield Sample("long boolean mask", inputs(allowed, batch=2), needs=("dense_mask",))
    yield Sample("window past a tile", inputs(), {"sliding_window": 70}, needs=("sliding_window",))
    lengths = torch.tensor([1, 70, 2, 33, 1, 64, 5, 17, 9], device=device)
    yield Sample("nine packed sequences", inputs(length=202), _packed(lengths), needs=("packed",))
    both = {**_packed(lengths), "sliding_window": 40}
    yield Sample("nine packed sequences, window", inputs(length=202), both, needs=("packed", "sliding_window"))
    yield Sample("softcap past 128 keys", inputs(), {"softcap": 2.0, "scaling": 1.0}, needs=("softcap",))
    yield Sample("sinks past 128 keys", inputs(), {"s_aux": leaf(draw.normal(4))}, needs=("sinks",))
    bias = {"position_bias": leaf(draw.normal(1, 4, 150, 150))}
    yield Sample("position bias past 128 keys", inputs(), bias, needs=("position_bias",))


def _large(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    draw = Draw(device, dtype)
    module = AttentionModule(4)
    query, key, value = _heads(draw, 2, 16, 4, 1027, 128)
    # A causal row averages over all keys up to its own, so its output would shrink with its position. With values that
    # grow by position and nearly uniform weights, all rows are of one magnitude. Otherwise the tolerance would be far
    # too loose for rows with many keys, and rows with few keys would exceed it by rounding alone.
    growing = torch.arange(1, 1028, device=device).sqrt().to(dtype)[:, None]
    yield Sample("a model's heads", (module, leaf(query.detach() / 2), key, leaf(value.detach() * growing), None))
    lengths = draw.integers(100, 40, low=1)
    inputs = (module, *_heads(draw, 1, 8, 2, int(lengths.sum()), 64), None)
    yield Sample("40 packed sequences", inputs, _packed(lengths), needs=("packed",))
    inputs = (module, *_heads(draw, 1, 4, 1, 2053, 64), None)
    yield Sample("window of 512", inputs, {"sliding_window": 512}, needs=("sliding_window",))


def _samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    draw = Draw(device, dtype)
    heads = functools.partial(_heads, draw)
    grouped, plain = AttentionModule(2), AttentionModule(1)
    yield Sample("causal, grouped heads", (grouped, *heads(2, 4, 2, 17, 32), None))
    query, key, _ = heads(2, 4, 2, 17, 64)
    *_, narrow = heads(2, 4, 2, 17, 32)
    yield Sample("values narrower than queries", (grouped, query, key, narrow, None))
    yield Sample("given scaling", (plain, *heads(1, 2, 2, 9, 64), None), {"scaling": 0.25})
    allowed = torch.ones(2, 1, 12, 12, dtype=torch.bool, device=device).tril()
    allowed[1, :, :, 8:] = False
    yield Sample("boolean mask", (grouped, *heads(2, 4, 2, 12, 32), allowed), needs=("dense_mask",))
    added = torch.zeros(2, 1, 12, 12, device=device, dtype=dtype).masked_fill(~allowed, torch.finfo(dtype).min)
    yield Sample("added mask", (grouped, *heads(2, 4, 2, 12, 32), added), needs=("dense_mask",))
    not_causal = AttentionModule(1, is_causal=False)
    yield Sample("not causal", (not_causal, *heads(2, 2, 2, 11, 32), None))
    query, *_ = heads(2, 2, 2, 1, 32)
    _, key, value = heads(2, 2, 2, 6, 32)
    yield Sample("one query of many keys", (plain, query, key, value, None))
    unpadded = torch.ones(2, 12, dtype=torch.bool, device=device)
    unpadded[1, 9:] = False
    yield Sample("padding mask", (grouped, *heads(2, 4, 2, 12, 32), unpadded), needs=("padding_mask",))
    crossing = (not_causal, *heads(2, 2, 2, 7, 32)[:1], *heads(2, 2, 2, 12, 32)[1:], unpadded)
    yield Sample("padding mask, across", crossing, needs=("padding_mask",))
    window = {"sliding_window": 5}
    yield Sample("sliding window", (grouped, *heads(2, 4, 2, 19, 32), None), window, needs=("sliding_window",))
    order = Draw(device, torch.float32, seed=1).normal(4).argsort()
    lengths = torch.tensor([5, 1, 3, 12], device=device)[order]
    packed = _packed(lengths)
    yield Sample("packed sequences", (grouped, *heads(1, 4, 2, 21, 32), None), packed, needs=("packed",))
    both = {**packed, **window}
    needs = ("packed", "sliding_window")
    fewer = torch.tensor([3, 1, 3, 3], device=device)[order]
    query, *_ = heads(1, 4, 2, 10, 32)
    _, key, value = heads(1, 4, 2, 21, 32)
    last = _packed(fewer, lengths)
    yield Sample("packed, the last queries", (grouped, query, key, value, None), last, needs=("packed",))
    yield Sample("packed, sliding window", (grouped, *heads(1, 4, 2, 21, 32), None), both, needs=needs)
    capped = {"softcap": 2.0, "scaling": 1.0}
    yield Sample("softcap", (grouped, *heads(2, 4, 2, 13, 32), None), capped, needs=("softcap",))
    sinks = {"s_aux": leaf(draw.normal(4))}
    yield Sample("sinks", (grouped, *heads(2, 4, 2, 13, 32), None), sinks, needs=("sinks",))
    yield Sample("not causal, as the call says", (grouped, *heads(2, 4, 2, 11, 32), None), {"is_causal": False})
    query_sinks = {"sinks": leaf(draw.normal(2, 4, 13, 1))}
    yield Sample("query sinks", (grouped, *heads(2, 4, 2, 13, 32), None), query_sinks, needs=("query_sinks",))
    bias = {"position_bias": leaf(draw.normal(1, 4, 12, 12)), "scaling": 1.0}
    yield Sample("position bias", (grouped, *heads(2, 4, 2, 12, 32), None), bias, needs=("position_bias",))
    both_kinds = ("dense_mask", "position_bias")
    bias = {"position_bias": leaf(draw.normal(2, 2, 12, 12))}
    yield Sample("position bias, boolean mask", (plain, *heads(2, 2, 2, 12, 32), allowed), bias, needs=both_kinds)
    preferred = draw.normal(2, 12, 12) + 9 * torch.eye(12, device=device, dtype=dtype)  # each query sees its own key
    chosen = {"indices": preferred.topk(5).indices}
    yield Sample("chosen keys", (grouped, *heads(2, 4, 2, 12, 32), None), chosen, needs=("chosen_keys",))
    yield from combined_options(device, dtype, _heads, _packed, AttentionModule)


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
        op_name="attention",
        variant="standard",
        reference=standard,
        samples=_samples,
        values=VALUES,
        gradients=GRADIENTS,
        beyond_a_tile=_beyond_a_tile,
        large=_large,
        primary=lambda result: (result[0],),
    )
}
