"""attention with a mask of its own kind: an object that holds which keys each query must not see."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers.masking_utils import sdpa_mask

from veomni_ops.attention import refuse, standard


@dataclass(frozen=True)
class HiddenPairs:
    """``hidden[B, 1, S, L]``, boolean: true where a query doesn't see a key."""

    hidden: Tensor


def hidden_pairs(*arguments: Any, **options: Any) -> HiddenPairs:
    """Build the mask of one forward; called by transformers, as its own mask functions are."""
    kept = sdpa_mask(*arguments, **{**options, "allow_is_causal_skip": False})
    return HiddenPairs(~kept)


def kernel(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: HiddenPairs | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """``query[B, Hq, S, D]``, ``key[B, Hk, L, D]``, ``value[B, Hk, L, Dv]`` to ``[B, S, Hq, Dv]``, and no weights.

    Raises:
        ValueError: a mask of another kind, dropout, a window, packed sequences, a softcap or sinks are requested.
    """
    refuse("acme", options, attention_mask)
    asked = [name for name in ("sliding_window", "cu_seq_lens_q", "softcap", "s_aux") if options.get(name) is not None]
    if dropout or asked:
        raise ValueError(f"acme does not compute {' and '.join(asked or ['dropout'])}")
    if attention_mask is not None and not isinstance(attention_mask, HiddenPairs):
        raise ValueError("acme takes masks that its own function builds, not tensors")
    mask = None if attention_mask is None else ~attention_mask.hidden
    return standard(module, query, key, value, mask, scaling=scaling, is_causal=is_causal)[0], None
