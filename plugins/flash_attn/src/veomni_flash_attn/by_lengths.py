"""Shared by the FlashAttention adapters: turns transformers' attention call into a dense or a varlen call, and back.

FlashAttention takes no mask. A library has two entry points: dense, for a batch ``[B, S, H, D]`` of equally long
sequences, and varlen, for packed sequences ``[T, H, D]`` with their boundaries (``cu_seqlens``). A padding mask becomes
a varlen call without the padding.

Shapes: B batch, S queries and L keys per sequence, T queries and U keys in total, Hq query heads, Hk key heads, D width
of query and key heads, Dv width of value heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from veomni_core.errors import ConfigError
from veomni_core.kernels import cast_as_autocast
from veomni_flash_attn.limits import MULTIPLE, WIDEST_HEAD
from veomni_flash_attn.packing import packing
from veomni_ops.attention import refuse


@dataclass(frozen=True)
class Options:
    """The options of one call. ``window``: how many keys a query sees to each side of its own; ``None`` for all."""

    scaling: float
    causal: bool
    window: int | None
    softcap: float
    dropout: float
    sinks: Tensor | None


@dataclass(frozen=True)
class Bounds:
    """Boundaries of packed sequences: ``cu_seqlens`` of queries and keys, and an upper bound on their lengths.

    ``queries`` and ``keys`` are contiguous int32 ``[sequences + 1]`` that begin with 0.
    """

    queries: Tensor
    keys: Tensor
    longest_query: int
    longest_key: int


class Library(Protocol):
    """One FlashAttention package."""

    @property
    def name(self) -> str:
        """The kernel's name in the config."""

    def refuses(self, query: Tensor, value: Tensor, options: Options, packed: bool) -> list[str]:
        """What the library can't compute in this call, one phrase each; empty if it can compute the call."""

    def dense(self, query: Tensor, key: Tensor, value: Tensor, options: Options) -> Tensor:
        """Dense: ``[B, S, Hq, D]``, ``[B, L, Hk, D]``, ``[B, L, Hk, Dv]`` to ``[B, S, Hq, Dv]``."""

    def packed(self, query: Tensor, key: Tensor, value: Tensor, bounds: Bounds, options: Options) -> Tensor:
        """Varlen: ``[T, Hq, D]``, ``[U, Hk, D]``, ``[U, Hk, Dv]`` to ``[T, Hq, Dv]``."""


def attend(
    library: Library,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: Any = None,
    max_length_k: Any = None,
    position_ids: Tensor | None = None,
    cu_seqlens_of_rows: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute the attention op (:mod:`veomni_ops.attention`) with ``library``.

    Under autocast, queries, keys and values are cast to its dtype (a rotary embedding computed in float32 leaves them
    in float32). With ``cu_seq_lens_q`` and ``cu_seq_lens_k`` the host never waits for the device. Without them, each
    layer checks on the host whether ``position_ids`` restart, which means packed sequences; a padding mask is read on
    the host too.

    Args:
        query: ``[B, Hq, S, D]``.
        key: ``[B, Hk, L, D]``.
        value: ``[B, Hk, L, Dv]``.
        attention_mask: Padding mask ``[B, L]``, or None. It may be shorter than L, see :func:`_padded`.
        cu_seq_lens_q: ``[sequences + 1]``; then ``B`` is 1.
        cu_seq_lens_k: ``[sequences + 1]``.
        max_length_q: The longest sequence. If it is missing or not an int, ``S`` serves as an upper bound.
        position_ids: ``[B, S]``.
        cu_seqlens_of_rows: as ``cu_seq_lens_q``, of all rows put one after the other.

    Returns:
        ``[B, S, Hq, Dv]``, and ``None`` for the attention weights.

    Raises:
        ConfigError: the library can't compute the call.
    """
    refuse(library.name, others, attention_mask)
    # [B, H, S, D] to [B, S, H, D]
    query, key, value = (cast_as_autocast(each.transpose(1, 2)) for each in (query, key, value))
    options = Options(
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        causal=module.is_causal if is_causal is None else is_causal,
        # transformers counts the query's own position in the window, FlashAttention doesn't.
        window=None if sliding_window is None or sliding_window >= key.shape[1] else sliding_window - 1,
        softcap=softcap or 0.0,
        dropout=dropout,
        sinks=s_aux,
    )
    given = packing(query, cu_seq_lens_q, cu_seq_lens_k)
    if given is None and cu_seqlens_of_rows is not None:
        given = (cu_seqlens_of_rows, cu_seqlens_of_rows)
    if given is not None and attention_mask is not None:
        raise ConfigError(
            f"{library.name} takes a padding mask or packed sequences, not both; pack without padding and pass no mask"
        )
    if attention_mask is not None and attention_mask.dim() != 2:
        raise ConfigError(
            f"{library.name} takes a padding mask [batch, keys] or none, not one of {tuple(attention_mask.shape)}; for "
            "masks of other shapes choose sdpa or flex_attention"
        )
    bounds = None
    if given is not None:
        longest = (_longest(max_length_q, query.shape[1]), _longest(max_length_k, key.shape[1]))
        bounds = Bounds(given[0].int().contiguous(), given[1].int().contiguous(), *longest)
    elif attention_mask is None:
        bounds = _restarts(position_ids, query, key)
    packed = bounds is not None or attention_mask is not None
    if problems := library.refuses(query, value, options, packed):
        raise ConfigError(f"{library.name} does not compute {'; nor '.join(problems)}")
    if bounds is not None:
        output = library.packed(query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1), bounds, options)
        return output.unflatten(0, query.shape[:2]), None
    if attention_mask is not None:
        return _padded(library, query, key, value, attention_mask.bool(), options), None
    return library.dense(query, key, value, options), None


def unsupported_heads(query: Tensor, value: Tensor, widest: int = WIDEST_HEAD) -> list[str]:
    """Problems for any FlashAttention: it takes widths of 8 to ``widest`` in multiples of 8, in bfloat16 or float16."""
    widths = (query.shape[-1], value.shape[-1])
    problems = []
    if any(width % MULTIPLE or width > widest for width in widths):
        problems.append(f"heads of {widths[0]} in queries and {widths[1]} in values")
    if query.dtype not in (torch.bfloat16, torch.float16):
        dtype = f"{query.dtype}".removeprefix("torch.")
        problems.append(f"{dtype} (run the model under autocast, or with weights in bfloat16)")
    return problems


def equally_wide(*heads: Tensor) -> tuple[Tensor, ...]:
    """Pad the narrower heads with zeros, for kernels that need one width for queries, keys and values.

    The scores don't change; the caller slices the output back to Dv. DeepSeek's latent attention has values narrower
    than its queries.
    """
    return padded_to(max(each.shape[-1] for each in heads), *heads)


def padded_to(width: int, *heads: Tensor) -> tuple[Tensor, ...]:
    """Pad heads that are narrower than ``width`` with zeros."""
    return tuple(each if each.shape[-1] == width else pad(each, (0, width - each.shape[-1])) for each in heads)


def _padded(library: Library, query: Tensor, key: Tensor, value: Tensor, kept: Tensor, options: Options) -> Tensor:
    """Remove the padding, compute the remaining tokens as packed sequences, and scatter the result back.

    Queries at padded positions give zeros. If attention is causal or has a window, queries are the last of the
    ``kept.shape[1]`` positions, since the library aligns the last one with the last key; otherwise no query is padding.

    Args:
        query: ``[B, S, Hq, D]``.
        key: ``[B, L, Hk, D]``.
        value: ``[B, L, Hk, Dv]``.
        kept: ``[B, positions]``, False at padding. It may have fewer positions than there are keys: the keys after it
            are the part of a static cache that has not been written yet.
    """
    batch, queries = query.shape[:2]
    length = kept.shape[1]
    aligned = options.causal or options.window is not None
    if length > key.shape[1] or (aligned and queries > length):
        raise ConfigError(
            f"{library.name} got a padding mask of {length} positions for {queries} queries and {key.shape[1]} keys; "
            "pass one with a position for each key"
        )
    kept_queries = kept[:, -queries:] if aligned else kept.new_ones(batch, queries)
    # Indices (batch, position) of the tokens that remain.
    of_query, of_key = (each.nonzero(as_tuple=True) for each in (kept_queries, kept))
    bounds = Bounds(_bounds(kept_queries), _bounds(kept), queries, length)
    # Gathered: [T, Hq, D], [U, Hk, D], [U, Hk, Dv]
    output = library.packed(query[of_query], key[of_key], value[of_key], bounds, options)
    return output.new_zeros(batch, queries, *output.shape[1:]).index_put(of_query, output)


def _bounds(kept: Tensor) -> Tensor:
    """``cu_seqlens`` of the True positions of ``kept[B, positions]``: int32 ``[B + 1]``."""
    return pad(kept.sum(dim=-1).cumsum(0), (1, 0)).int()


def _restarts(position_ids: Tensor | None, query: Tensor, key: Tensor) -> Bounds | None:
    """Boundaries where ``position_ids`` do not increase, over all rows of the batch; ``None`` if they always increase.

    Positions that jump forward belong to one sequence, as in transformers.
    """
    flat = position_ids is not None and position_ids.dim() == 2 and position_ids.shape == query.shape[:2]
    if not flat or query.shape[1] != key.shape[1] or query.shape[1] < 2:
        return None
    assert position_ids is not None
    # Position 0 of each row begins a sequence; so does every position that is not above the one before it.
    back = torch.diff(position_ids, dim=1) < 1
    if not back.any():
        return None
    starts = pad(back, (1, 0), value=True).flatten().nonzero().flatten()
    bounds = pad(starts, (0, 1), value=position_ids.numel()).int()
    return Bounds(bounds, bounds, query.shape[1], query.shape[1])


def _longest(given: Any, most: int) -> int:
    """``given`` if it is an int, else the upper bound ``most``: reading a tensor would wait for the device."""
    return given if isinstance(given, int) else most
