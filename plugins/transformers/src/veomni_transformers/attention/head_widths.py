"""How wide the heads of attention modules are: as seen in their calls, or where none was seen, as the modules state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from veomni_transformers.attention.trace import AttentionCall

# Other widths need the features wide_heads (over 256) and odd_heads (no multiple of 8).
_WIDEST_HEAD, _MULTIPLE = 256, 8
# Where modules, and then their configs, state the width. Latent attention (MLA) states that of values separately.
_OF_QUERIES = ("qk_head_dim", "head_dim", "attention_head_size")
_OF_VALUES = ("v_head_dim",)


def head_widths(calls: Iterable[AttentionCall], unseen: Iterable[nn.Module]) -> dict[str, list[int]]:
    """Every width of the heads of queries and keys (``head_dim``), and of values (``value_head_dim``).

    Args:
        calls: the calls of attention that were recorded.
        unseen: the attention modules of which no call was recorded, for whose widths their own attributes count.
    """
    pairs = [(heads.shape[-1], call.heads[2].shape[-1]) for call in calls for heads in call.heads[:2]]
    pairs += [stated for module in unseen if (stated := _stated(module)) is not None]
    return {
        "head_dim": sorted({queries for queries, _ in pairs}),
        "value_head_dim": sorted({values for _, values in pairs}),
    }


def features_needed(widths: Mapping[str, list[int]]) -> Iterator[str]:
    """The features that a kernel must declare for heads of these widths."""
    every = {width for some in widths.values() for width in some}
    if any(width > _WIDEST_HEAD for width in every):
        yield "wide_heads"
    if any(width % _MULTIPLE for width in every):
        yield "odd_heads"


def _stated(module: Any) -> tuple[int, int] | None:
    queries = _first_number((module, module.config), _OF_QUERIES) or _share_of_hidden_size(module.config)
    if not queries:
        return None
    return queries, _first_number((module, module.config), _OF_VALUES) or queries


def _share_of_hidden_size(config: Any) -> int:
    hidden, heads = (_first_number((config,), (name,)) for name in ("hidden_size", "num_attention_heads"))
    return hidden // heads if hidden and heads else 0


def _first_number(holders: Iterable[Any], names: Iterable[str]) -> int:
    """The first positive whole number that one of ``holders`` has under one of ``names``; 0 if there is none."""
    found = (getattr(holder, name, None) for holder in holders for name in names)
    return next((value for value in found if type(value) is int and value > 0), 0)
