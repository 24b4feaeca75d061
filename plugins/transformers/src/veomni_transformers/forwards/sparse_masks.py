"""Which keys the queries of sparse attention see, as ranges: two numbers for each query in the place of a mask.

A causal mask, of packed sequences and of padding at an end too, is a range of keys for each query, and DeepSeek's
sparse attention takes it as one: int32 ``[B, 1, T, 2]``, where a mask is ``[B, 1, T, S]``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils

from veomni_transformers.proving.functions import with_globals

Function = Callable[..., Any]
# What `create_causal_mask` looks up: the functions that build masks, and the one that keeps packed sequences apart.
_INTERFACES, _PACKED = "ALL_MASK_ATTENTION_FUNCTIONS", "packed_sequence_compatibility_function"


def sees(mask: Tensor, keys: Tensor) -> Tensor:
    """Whether queries see ``keys[B, T, K]``, by a mask ``[B, T, S]`` or ranges ``[B, T, 2]``; by these never -1.

    Example:
        >>> ranges = torch.tensor([[[1, 3]]], dtype=torch.int32)
        >>> sees(ranges, torch.tensor([[[0, 1, 2, 3]]])).tolist()
        [[[False, True, True, False]]]
    """
    if is_ranges(mask):
        return (keys >= mask[..., :1]) & (keys < mask[..., 1:])
    return as_bools(mask).gather(-1, keys.long())


def is_ranges(mask: Tensor) -> bool:
    """Whether ``mask`` has ranges; masks are bools, or numbers that are added."""
    return mask.dtype == torch.int32


def as_bools(mask: Tensor) -> Tensor:
    """A mask in which hidden keys are False, or have a score added that is the lowest of the dtype, as bools."""
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


def with_ranges(build: Function) -> Function:
    """``create_causal_mask``, for one model: ranges where it must build a mask, and those say what the mask says.

    It must where a model says ``allow_is_causal_skip=False``, as for an indexer. A mask that is given, holes between
    words, other functions of positions and static caches are built as ever.
    """
    ranged = with_globals(build, {_INTERFACES: _Interfaces(), _PACKED: _Packed})

    def built(*args: Any, **call: Any) -> Any:
        return (ranged if always_builds(call) else build)(*args, **call)

    return built


def always_builds(call: dict[str, Any]) -> bool:
    """Whether ``call`` of ``create_causal_mask`` wants a mask where attention would need none."""
    return call.get("allow_is_causal_skip") is False


class _Interfaces:
    """Stands for transformers' table of functions that build masks."""

    def __getitem__(self, name: str) -> Function:
        return partial(_ranges, masking_utils.ALL_MASK_ATTENTION_FUNCTIONS[name])


class _Packed:
    """The mask of packed sequences, and what it is made of."""

    def __init__(self, mask_function: Function, position_ids: Tensor, sequence: Tensor) -> None:
        self.within, self.sequence = mask_function, sequence
        self._packed = masking_utils.packed_sequence_compatibility_function(mask_function, position_ids, sequence)

    def __call__(self, *places: Any) -> Any:
        return self._packed(*places)


def _ranges(build: Function, **call: Any) -> Tensor | None:
    """What ``build`` would say, as ranges; what it builds where they can't say it."""
    causal, padding, offset = call["mask_function"], call["attention_mask"], call["q_offset"]
    packed = causal if isinstance(causal, _Packed) else None
    plain = (packed.within if packed else causal) is masking_utils.causal_mask_function
    read = padding is not None and not torch.compiler.is_compiling()  # whether its words have no holes
    if not plain or type(offset) is not int or call["kv_offset"] or not (padding is None or read):
        return build(**call)  # type: ignore[no-any-return]
    rows, queries, keys, device = (call[name] for name in ("batch_size", "q_length", "kv_length", "device"))
    begin, stop = torch.zeros(rows, queries, dtype=torch.long, device=device), _places(queries, device) + offset + 1
    if packed:
        starts = packed.sequence.diff(dim=-1, prepend=packed.sequence[:, :1] - 1) != 0
        begin = torch.where(starts, _places(queries, device), 0).cummax(-1)[0]
    if padding is not None:
        padding = padding[:, :keys]
        first, words = padding.int().argmax(-1, keepdim=True), padding.sum(-1, keepdim=True)
        within = (_places(keys, device) >= first) & (_places(keys, device) < first + words)
        if padding.shape[-1] != keys or not torch.equal(within, padding):
            return build(**call)  # type: ignore[no-any-return]
        begin, stop = begin.maximum(first), stop.minimum(first + words)
    stop = stop.clamp_max(keys).expand(rows, -1)
    return torch.stack([begin.minimum(stop), stop], dim=-1).to(torch.int32).unsqueeze(1)


def _places(count: int, device: torch.device) -> Tensor:
    return torch.arange(count, device=device)
