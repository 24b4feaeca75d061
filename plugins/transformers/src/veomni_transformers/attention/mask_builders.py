"""The functions that build the masks of kernels: transformers' own, but for static caches under FlashAttention.

And in the place of eager attention, where a mask says all, but for calls with ``is_causal``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any

import torch
from torch import Tensor

Function = Callable[..., Any]


def builder_of(interface: str) -> Function:
    """The function that builds masks of transformers' ``interface``."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, flash_attention_mask

    build: Function = ALL_MASK_ATTENTION_FUNCTIONS[interface]
    return padding_and_written_keys if build is flash_attention_mask else build


def takes_lengths(build: Function) -> bool:
    """Whether ``build`` builds masks of padding alone, so that the kernel keeps packed sequences apart by itself."""
    from transformers.masking_utils import flash_attention_mask

    return build in (flash_attention_mask, padding_and_written_keys, saying_not_causal(padding_and_written_keys))


@lru_cache(maxsize=64)
def saying_not_causal(build: Function) -> Function:
    """``build``, for a kernel in the place of eager attention, which depends on its mask only.

    transformers puts the ``is_causal`` of a model's call into the config while masks are built. Not every model hands
    it to its attention too, where a kernel without a mask of queries and keys then does what the module says. So where
    there is an ``is_causal``, masks that aren't causal are of queries and keys, as views that take no memory.
    ``like_eager`` knows them by that, also where a checkpoint runs a layer again and the config has lost it.
    """

    @wraps(build)
    def building(**call: Any) -> Any:
        is_causal = getattr(call.get("config"), "is_causal", None)
        bidirectional = "allow_is_bidirectional_skip" in call
        if is_causal is False and not bidirectional:  # as masks of chunks, which stay causal
            call["allow_is_causal_skip"] = False
        mask = build(**call)
        if is_causal is None or not bidirectional:
            return mask
        queries = call["q_length"] if "q_length" in call else len(call["cache_position"])  # before transformers 5.6
        if queries == 1 or not (mask is None or (isinstance(mask, Tensor) and mask.dim() == 2)):
            return mask
        if mask is None:
            mask = torch.ones((), dtype=torch.bool, device=call.get("device", "cpu"))
            return mask.expand(call["batch_size"], 1, queries, call["kv_length"])
        return mask.bool()[:, None, None, :].expand(-1, 1, queries, -1)

    return building


def padding_and_written_keys(**call: Any) -> Tensor | None:
    """transformers' ``flash_attention_mask``, which also ends where a static cache's unwritten keys begin.

    A static cache hands all of its slots to attention. FlashAttention leaves out those after the mask's end, but
    transformers builds no mask without padding, and one as long as the user's own, which may cover all slots.
    """
    from transformers.masking_utils import flash_attention_mask

    keys, padding = call["kv_length"], call.get("attention_mask")
    written = _written(call)
    if written < keys:
        start = call.get("kv_offset", 0)
        if padding is None:
            call["attention_mask"] = _ones(call, written)
        elif padding.shape[1] > start + written:
            call["attention_mask"] = padding[:, start : start + written]
    mask: Tensor | None = flash_attention_mask(**call)
    return mask


def _written(call: dict[str, Any]) -> int:
    """How many of the call's keys have been written, from the first: all but for static caches, which is read there."""
    keys: int = call["kv_length"]
    if "allow_is_bidirectional_skip" in call:  # not causal: the keys may be an encoder's
        return keys
    start = call.get("kv_offset", 0)
    if "cache_position" in call:  # transformers before 5.6 passes each query's position, not their number
        positions: Tensor = call["cache_position"]
        return keys if len(positions) == keys else int(positions[-1]) + 1 - start
    return int(call.get("q_offset", 0)) + int(call["q_length"]) - start


def _ones(call: dict[str, Any], length: int) -> Tensor:
    return torch.ones(call["batch_size"], length, dtype=torch.bool, device=call.get("device", "cpu"))
