"""What sample calls of attention are made of: the calling module, heads, and packed sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from veomni_ops.contract import Draw, leaf

BY_LENGTHS = "flash_attention_mask"  # what a kernel declares that takes FlashAttention's masks


@dataclass(frozen=True)
class AttentionModule:
    """The attributes that an attention kernel reads from its calling module; samples pass this instead of one.

    Args:
        num_key_value_groups: how many query heads share a key head.
        is_causal: whether attention is causal where neither mask nor call says otherwise.
        training: whether the module is in training mode.
        from_the_first_key: where causal attention without a mask is aligned, for the reference; no kernel reads it. A
            kernel that takes FlashAttention's masks aligns the last query with the last key, any other the first query
            with the first key.

    Example:
        >>> AttentionModule(num_key_value_groups=4)
        AttentionModule(num_key_value_groups=4, is_causal=True, training=True, from_the_first_key=False)
    """

    num_key_value_groups: int
    is_causal: bool = True
    training: bool = True
    from_the_first_key: bool = False


def heads_of(
    draw: Draw, batch: int, q_heads: int, k_heads: int, length: int, head: int, value_head: int | None = None
) -> tuple[Tensor, ...]:
    """Queries, keys and values as projections leave them, ``[B, H, S, D]`` in the memory of ``[B, S, H, D]``.

    ``value_head`` is the width of the values, ``head`` without it.

    Example:
        >>> import torch
        >>> draw = Draw(torch.device("cpu"), torch.float32)
        >>> for heads in heads_of(draw, batch=2, q_heads=4, k_heads=1, length=5, head=32, value_head=16):
        ...     print(tuple(heads.shape), heads.is_contiguous())
        (2, 4, 5, 32) False
        (2, 1, 5, 32) True
        (2, 1, 5, 16) True
    """
    shapes = ((q_heads, head), (k_heads, head), (k_heads, value_head or head))
    return tuple(leaf(draw.normal(batch, length, *shape).transpose(1, 2)) for shape in shapes)


def packed_of(lengths: Tensor, key_lengths: Tensor | None = None) -> dict[str, Any]:
    """The options of a varlen call with sequences of these lengths; ``key_lengths`` if the keys have other lengths.

    Example:
        >>> import torch
        >>> options = packed_of(torch.tensor([3, 2]))
        >>> options["cu_seq_lens_q"].tolist(), options["max_length_k"]
        ([0, 3, 5], 3)
    """
    pairs = (("q", lengths), ("k", lengths if key_lengths is None else key_lengths))
    bounds = {name: F.pad(each.cumsum(0), (1, 0)).int() for name, each in pairs}
    return {
        **{f"cu_seq_lens_{name}": bounds[name] for name, _ in pairs},
        **{f"max_length_{name}": int(each.max()) for name, each in pairs},
    }
