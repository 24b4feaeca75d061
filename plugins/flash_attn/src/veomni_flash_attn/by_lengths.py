"""What the FlashAttention libraries have in common: no mask, but lengths. From transformers' call to theirs, and back.

A library gives two calls: one for a batch ``[B, S, H, D]`` of full sequences, and one for sequences of several lengths
one after the other, ``[T, H, D]``, with their bounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from veomni_core.ops.attention import refuse
from veomni_core.ops.autocast import cast_as_autocast
from veomni_flash_attn.packing import packing

_WIDEST = 256


@dataclass(frozen=True)
class Options:
    """What the scores go through. ``window`` is how many keys to each side a query sees, or ``None`` for all."""

    scaling: float
    causal: bool
    window: int | None
    softcap: float
    dropout: float
    sinks: Tensor | None


@dataclass(frozen=True)
class Bounds:
    """Where sequences begin and end: int32 ``[sequences + 1]`` from 0, contiguous; and the longest or a bound of it."""

    queries: Tensor
    keys: Tensor
    longest_query: int
    longest_key: int


class Library(Protocol):
    """One FlashAttention package. ``refuses`` gives sentences on what it can't compute of a call."""

    @property
    def name(self) -> str:
        """The kernel's."""

    def refuses(self, query: Tensor, value: Tensor, options: Options, packed: bool) -> list[str]:
        """Why not; empty where it can."""

    def dense(self, query: Tensor, key: Tensor, value: Tensor, options: Options) -> Tensor:
        """``[B, S, Hq, D]``, ``[B, L, Hk, D]``, ``[B, L, Hk, Dv]`` to ``[B, S, Hq, Dv]``."""

    def packed(self, query: Tensor, key: Tensor, value: Tensor, bounds: Bounds, options: Options) -> Tensor:
        """``[T, Hq, D]``, ``[U, Hk, D]``, ``[U, Hk, Dv]`` to ``[T, Hq, Dv]``."""


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
    **others: Any,
) -> tuple[Tensor, None]:
    """The op's call (:mod:`veomni_core.ops.attention`) by ``library``.

    Under autocast, queries, keys and values (which a rotary embedding in float32 leaves in float32) take its dtype.
    With ``cu_seq_lens_q`` and ``cu_seq_lens_k`` nothing waits for the device. Without them, sequences whose
    ``position_ids [B, S]`` restart are packed too, which takes a look in every layer; and a padding mask is looked at.

    Raises:
        ValueError: the library can't compute what is asked for.
    """
    refuse(library.name, others)
    query, key, value = (cast_as_autocast(each.transpose(1, 2)) for each in (query, key, value))
    options = Options(
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        causal=module.is_causal if is_causal is None else is_causal,
        window=None if sliding_window is None or sliding_window >= key.shape[1] else sliding_window - 1,
        softcap=softcap or 0.0,
        dropout=dropout,
        sinks=s_aux,
    )
    given = packing(query, cu_seq_lens_q, cu_seq_lens_k)
    if given is not None and attention_mask is not None:
        raise ValueError(
            f"{library.name} takes a padding mask or packed sequences, not both; leave the padding out of the packing"
        )
    if attention_mask is not None and attention_mask.dim() != 2:
        raise ValueError(
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
        raise ValueError(f"{library.name} does not compute {'; nor '.join(problems)}")
    if bounds is not None:
        output = library.packed(query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1), bounds, options)
        return output.unflatten(0, query.shape[:2]), None
    if attention_mask is not None:
        return _padded(library, query, key, value, attention_mask.bool(), options), None
    return library.dense(query, key, value, options), None


def unsupported_heads(query: Tensor, value: Tensor) -> list[str]:
    """Why no FlashAttention takes them: they are 8 to 256 wide, in multiples of 8, in bfloat16 or float16."""
    widths = (query.shape[-1], value.shape[-1])
    problems = []
    if any(width % 8 or width > _WIDEST for width in widths):
        problems.append(f"heads of {widths[0]} in queries and {widths[1]} in values")
    if query.dtype not in (torch.bfloat16, torch.float16):
        dtype = f"{query.dtype}".removeprefix("torch.")
        problems.append(f"{dtype} (run the model under autocast, or with weights in bfloat16)")
    return problems


def equally_wide(*heads: Tensor) -> tuple[Tensor, ...]:
    """Zeros after the narrower ones, for kernels of one width: no score changes, and the output's heads are to be cut
    again. Latent attention (DeepSeek's) has values narrower than its queries."""
    width = max(each.shape[-1] for each in heads)
    return tuple(each if each.shape[-1] == width else pad(each, (0, width - each.shape[-1])) for each in heads)


def _padded(library: Library, query: Tensor, key: Tensor, value: Tensor, kept: Tensor, options: Options) -> Tensor:
    """Without its padding a batch is packed sequences. Queries are the last keys' own where they are causal.

    The mask may end before the keys: what follows in a static cache has not been written yet.
    """
    batch, queries = query.shape[:2]
    length = kept.shape[1]
    if length > key.shape[1] or (options.causal and queries > length):
        raise ValueError(
            f"{library.name} can't tell which of {queries} queries and {key.shape[1]} keys are padding by a mask of "
            f"{length} positions"
        )
    kept_queries = kept[:, -queries:] if options.causal else kept.new_ones(batch, queries)
    of_query, of_key = (each.nonzero(as_tuple=True) for each in (kept_queries, kept))
    bounds = Bounds(_bounds(kept_queries), _bounds(kept), queries, length)
    output = library.packed(query[of_query], key[of_key], value[of_key], bounds, options)
    return output.new_zeros(batch, queries, *output.shape[1:]).index_put(of_query, output)


def _bounds(kept: Tensor) -> Tensor:
    return pad(kept.sum(dim=-1).cumsum(0), (1, 0)).int()


def _restarts(position_ids: Tensor | None, query: Tensor, key: Tensor) -> Bounds | None:
    """Bounds where positions go back, over all sequences of the batch; ``None`` where none does.

    Positions that jump forward are one sequence's, as in transformers.
    """
    flat = position_ids is not None and position_ids.dim() == 2 and position_ids.shape == query.shape[:2]
    if not flat or query.shape[1] != key.shape[1] or query.shape[1] < 2:
        return None
    assert position_ids is not None
    back = torch.diff(position_ids, dim=1) < 1
    if not back.any():
        return None
    starts = pad(back, (1, 0), value=True).flatten().nonzero().flatten()
    bounds = pad(starts, (0, 1), value=position_ids.numel()).int()
    return Bounds(bounds, bounds, query.shape[1], query.shape[1])


def _longest(given: Any, most: int) -> int:
    """The longest sequence's length; one that is still on the device is not waited for, as any upper bound does."""
    return given if isinstance(given, int) else most
