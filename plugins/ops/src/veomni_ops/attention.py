"""attention: softmax attention with the signature of transformers' ``AttentionInterface``.

``(module, query[B, Hq, S, D], key[B, Hk, L, D], value[B, Hk, L, Dv], attention_mask, scaling=None, dropout=0.0, ...)
-> (output[B, S, Hq, Dv], weights or None)``. ``module`` has the attributes ``num_key_value_groups``, ``training`` and
``is_causal``; an argument ``is_causal`` overrides the latter.

Whatever not every kernel computes is a feature. A kernel declares the features that it computes in its spec, and raises
for calls that need others:

- ``dense_mask``: ``attention_mask[B, 1 or Hq, S, L]``, boolean (True is kept) or added to the scores;
- ``padding_mask``: ``attention_mask[B, L]``, False or 0 at padding. With a causal mask, or a window that hides
  something, the output of a query at padding is zero;
- ``sliding_window``: without a dense mask, ``sliding_window=W`` lets a query see its last W keys, including its own;
- ``packed``: varlen attention. ``cu_seq_lens_q`` and ``cu_seq_lens_k`` (int32 ``[sequences + 1]``) delimit the
  sequences in a batch of one. Without them, a kernel with FlashAttention's masks may read them off ``position_ids``;
- ``softcap``: scores become ``softcap * tanh(scores / softcap)`` before the mask;
- ``softcap_by_lengths``: a softcap with ``padding_mask`` or ``packed``;
- ``sinks``: ``s_aux[Hq]`` is one more score in each row's softmax, whose weight is then dropped;
- ``query_sinks``: the same with a score per query, ``sinks[B, Hq, S, 1]``;
- ``position_bias``: ``position_bias[1 or B, Hq, S, L]`` is added to the scores, and gets a gradient (T5);
- ``chosen_keys``: sparse attention. Of the keys that it may see, a query sees only ``indices[B, S, chosen]``, or the
  blocks in ``block_indices``, whose size the module knows. The contract has no sample of ``block_indices``;
- ``dropout``: dropout of the attention weights;
- ``attention_weights``: the weights ``[B, Hq, S, L]`` as the second result, in every call (a config with
  ``output_attentions``). The contract has no sample of it, and no kernel here gives them;
- ``wide_heads``: a head dimension above 256; ``odd_heads``: a head dimension that is no multiple of 8.

The kind of mask that transformers builds for a kernel is a feature too, one of :data:`MASK_FEATURES`: ``sdpa_mask``
(boolean; left out where ``is_causal`` says the same), ``flash_attention_mask`` (of padding, or none) or
``flex_attention_mask`` (a ``BlockMask``). At a site where such masks don't express what the eager mask does, the plan
refuses the kernels that take them.

Without a mask, the kind also says where causal attention is aligned if there are more keys than queries. transformers
leaves FlashAttention's masks out after earlier tokens, so that the last query sees the last key. It leaves out the
others where a static cache is still empty, so that the first query sees the first key alone, as with torch's
``is_causal``; and for a single query, which then sees all keys.

A query that sees no key gives zeros; with an added mask that is finite, or with a position bias, a mean of all values.
No call is without queries or keys.

Only some models pass the options in :data:`FEATURES_OF_OPTIONS`. A kernel passes those that it doesn't compute to
:func:`refuse`. A site's ``sizes``: every width of its heads, ``head_dim`` of queries and keys, ``value_head_dim`` of
values; empty where neither a call nor a config shows them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from veomni_core.errors import ConfigError, PackedSequencesError
from veomni_ops.attention_alike import alike
from veomni_ops.attention_calls import AttentionModule as AttentionModule
from veomni_ops.attention_samples import beyond_a_tile, dropping, large, samples
from veomni_ops.contract import Contract, compute_dtype, tolerances
from veomni_ops.native_sparse_samples import CONTRACT

# By the attention interface of transformers whose masks the kernel takes.
MASK_FEATURES = {
    "sdpa": "sdpa_mask",
    "flash_attention": "flash_attention_mask",
    "flex_attention": "flex_attention_mask",
}
# Of packed sequences: in a batch of one, and of all rows, put one after the other.
BOUNDS = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens_of_rows")
FEATURES_OF_OPTIONS = {
    "position_bias": "position_bias",
    "indices": "chosen_keys",
    "block_indices": "chosen_keys",
    "sinks": "query_sinks",
}


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
    is True; the causal mask is aligned at the bottom right, so the last query sees all keys, unless ``module`` is
    :attr:`AttentionModule.from_the_first_key`.

    Args:
        module: the calling module, or :class:`AttentionModule`.
        query: ``[B, Hq, S, D]``, of any floating dtype.
        key: ``[B, Hk, L, D]``, in query's dtype.
        value: ``[B, Hk, L, Dv]``, in query's dtype.
        attention_mask: ``[B, 1 or Hq, S, L]``, boolean or added; or ``[B, L]``, False at padding.
        scaling: multiplies the scores; ``D ** -0.5`` without it.
        dropout: not computed here.
        softcap: bounds the scores.
        s_aux: a score per head ``[Hq]``, whose weight is dropped.
        sliding_window: how many keys a query sees, its own included. Not read with a dense mask.
        cu_seq_lens_q, cu_seq_lens_k: int32 ``[sequences + 1]``, the bounds of packed sequences.
        is_causal: overrides the module's attribute.
        position_bias: ``[1 or B, Hq, S, L]``, added to the scores.
        indices: the keys that a query may see, int64 ``[B, S, chosen]``.
        sinks: as ``s_aux``, with a score per query, ``[B, Hq, S, 1]``.
        kwargs: what else transformers passes; not read.

    Returns:
        ``(output[B, S, Hq, Dv], None)``, the output in query's dtype.

    Example:
        >>> query = torch.zeros(1, 4, 3, 8)  # four heads, three positions; all scores are 0
        >>> key = value = torch.tensor([0.0, 3.0, 6.0]).view(1, 1, 3, 1).expand(1, 2, 3, 8)  # two heads
        >>> output, _ = standard(AttentionModule(num_key_value_groups=2), query, key, value, None)
        >>> output.shape
        torch.Size([1, 3, 4, 8])
        >>> output[0, :, 0, 0]  # the means of what each position sees
        tensor([0.0000, 1.5000, 3.0000])
        >>> output, _ = standard(AttentionModule(2), query, key, value, None, sliding_window=2)
        >>> output[0, :, 0, 0]
        tensor([0.0000, 1.5000, 4.5000])
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
    padding = unseen = None
    causal = module.is_causal if is_causal is None else is_causal
    if attention_mask is None or attention_mask.dim() == 2:
        padding, at_first = attention_mask, attention_mask is None and getattr(module, "from_the_first_key", False)
        attention_mask = visible(scores, causal, sliding_window, cu_seq_lens_q, cu_seq_lens_k, at_first)
        if padding is not None:
            attention_mask = attention_mask & padding.bool()[:, None, None, :]
    if attention_mask.dtype == torch.bool and position_bias is not None:
        hidden = ~attention_mask
        attention_mask = torch.zeros_like(hidden, dtype=scores.dtype).masked_fill(hidden, torch.finfo(scores.dtype).min)
    if attention_mask.dtype == torch.bool:
        unseen = ~attention_mask.any(dim=-1, keepdim=True)  # their softmax would be NaN: they see all, and give zeros
        scores = scores.masked_fill(~(attention_mask | unseen), float("-inf"))
    else:
        scores = scores + attention_mask.to(scores.dtype)
    if s_aux is not None:
        sinks = s_aux[None, :, None, None].expand(*scores.shape[:-1], 1)
    if sinks is not None:
        weights = torch.cat([scores, sinks.to(scores.dtype)], dim=-1).softmax(dim=-1)[..., :-1].to(query.dtype)
    else:
        weights = scores.softmax(dim=-1).to(query.dtype)
    output = weights @ value
    output = (output if unseen is None else output.masked_fill(unseen, 0.0)).transpose(1, 2).contiguous()
    if padding is not None and (causal or (sliding_window or key.shape[2]) < key.shape[2]):
        output = output * padding.to(output.dtype)[:, -output.shape[1] :, None, None]
    return output, None


def refuse(kernel: str, options: Mapping[str, Any], mask: Any = True) -> None:
    """Raise instead of silently ignoring options that the kernel does not compute.

    Packed sequences, in one row or in several (:data:`BOUNDS`), are kept apart by a mask of queries and keys too. Where
    the call has one, their boundaries are not asked for.

    Args:
        kernel: the kernel's name, for the message.
        options: the keyword arguments that the kernel does not compute; ``None`` counts as not given.
        mask: the call's attention mask. Without this argument, boundaries are not looked at.

    Raises:
        PackedSequencesError: there are boundaries of packed sequences, and no mask but one of padding.
        ConfigError: ``options`` has some of :data:`FEATURES_OF_OPTIONS`, or ``output_attentions`` asks for the weights;
            the message names ``kernel`` and the options.

    Example:
        >>> refuse("acme", {"position_bias": None, "output_attentions": False}, mask=None)
        >>> refuse("acme", {"position_bias": torch.zeros(1, 4, 3, 3)}, mask=None)
        Traceback (most recent call last):
            ...
        veomni_core.errors.ConfigError: acme does not compute `position_bias`; choose eager
    """
    if asked := [f"`{name}`" for name in FEATURES_OF_OPTIONS if options.get(name) is not None]:
        raise ConfigError(f"{kernel} does not compute {' and '.join(asked)}; choose eager")
    if options.get("output_attentions"):
        raise ConfigError(f"{kernel} gives no attention weights; choose eager, or leave output_attentions out")
    packed = {name for name in BOUNDS if options.get(name) is not None}
    if packed and (mask is None or (isinstance(mask, Tensor) and mask.dim() < 4)):
        what = "several packed rows" if packed == {BOUNDS[-1]} else "packed sequences"
        raise PackedSequencesError(
            f"{kernel} keeps {what} apart by a mask alone, and the model gave it none: choose flash_attention_2, 3 or "
            "4, or flex_attention for a single row (attn_implementation), or pass each sequence alone"
        )


def visible(
    scores: Tensor,
    causal: bool,
    window: int | None,
    query_bounds: Tensor | None,
    key_bounds: Tensor | None,
    from_the_first_key: bool = False,
) -> Tensor:
    """The mask ``[S, L]``, True where a query sees a key. A sequence's last query is aligned with its last key.

    Args:
        scores: ``[..., S, L]``, of which only the shape and the device are read.
        causal: whether a query sees no key after its own.
        window: how many keys a query sees, its own included; ``None`` for all. If not causal, it reaches both ways.
        query_bounds, key_bounds: the bounds of packed sequences, ``[sequences + 1]``; ``None`` for one sequence.
        from_the_first_key: without bounds and with several queries, the first of them is aligned with the first key
            instead.

    Returns:
        Booleans ``[S, L]``.

    Example:
        >>> visible(torch.empty(2, 3), causal=True, window=None, query_bounds=None, key_bounds=None)
        tensor([[ True,  True, False],
                [ True,  True,  True]])
        >>> visible(torch.empty(2, 3), True, None, None, None, from_the_first_key=True)
        tensor([[ True, False, False],
                [ True,  True, False]])
        >>> bounds = torch.tensor([0, 1, 3])  # a sequence of one, and one of two
        >>> visible(torch.empty(3, 3), True, None, bounds, bounds).int()
        tensor([[1, 0, 0],
                [0, 1, 0],
                [0, 1, 1]], dtype=torch.int32)
    """
    ends = []
    numbers = []
    for length, bounds in zip(scores.shape[-2:], (query_bounds, key_bounds), strict=True):
        positions = torch.arange(length, device=scores.device)
        bounds = positions.new_tensor([0, length]) if bounds is None else bounds.long()
        numbers.append(torch.bucketize(positions, bounds[1:], right=True))
        ends.append(bounds[1:][numbers[-1]] - positions)
    ahead = ends[0][:, None] - ends[1]
    queries, keys = scores.shape[-2:]
    if from_the_first_key and queries > 1 and query_bounds is None:
        ahead = ahead + keys - queries
    kept = numbers[0][:, None] == numbers[1]
    kept = kept & (ahead <= 0) if causal else kept
    return kept if window is None else kept & (ahead.abs() < window)


VALUES = tolerances(float32=(2e-5, 4e-6), bfloat16=(4e-2, 1e-2), float16=(5e-3, 1.3e-3))
GRADIENTS = tolerances(float32=(4e-5, 1e-5), bfloat16=(8e-2, 2e-2), float16=(1e-2, 2.5e-3))

CONTRACTS = {
    "standard": Contract(
        op_name="attention",
        variant="standard",
        reference=standard,
        samples=samples,
        values=VALUES,
        gradients=GRADIENTS,
        beyond_a_tile=beyond_a_tile,
        large=large,
        alike=alike,
        dropping=dropping,
        primary=lambda result: (result[0],),
        # Queries and keys make logits of the factor's square. Backward computes probabilities again from logits in
        # float32, whose rounding at a million changes them by some percent: FlashAttention 4 was off by 9 % there.
        large_factor=1e2,
        # PyTorch's own fused attention loses digits of them on an H200: errors of 6.6e-4 in float32.
        denormal_inputs=False,
    ),
    "native_sparse": CONTRACT,
}
