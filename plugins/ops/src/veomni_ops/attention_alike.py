"""Calls of attention on other layouts of the same positions, to which batch invariance applies."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from veomni_ops.attention_calls import packed_of
from veomni_ops.contract import Alike, Sample

_ALIKE_OPTIONS = {"scaling", "softcap", "s_aux", "sliding_window", "is_causal"}
_BEFORE = 5  # positions of padding, or of another sequence


def alike(sample: Sample, features: Collection[str]) -> Iterator[Alike]:
    """Each sequence alone, token by token, padded on the left, and packed behind another.

    Args:
        sample: a call of the contract.
        features: what the kernel declares.

    Example:
        >>> from veomni_ops.attention_samples import samples
        >>> sample = next(samples(torch.device("cpu"), torch.float32))
        >>> [each.words for each in alike(sample, ("dense_mask",))][-3:]
        ['where query 16 is decoded', 'where it is padded on the left', 'where an added mask pads it on the left']
    """
    module, query, key, value, mask = sample.args
    query, key, value = (each.detach() for each in (query, key, value))
    options = {name: each for name, each in sample.kwargs.items() if not name.startswith(("cu_seq", "max_length"))}
    if set(options) - _ALIKE_OPTIONS:
        return

    def call(q: Tensor, k: Tensor, v: Tensor, m: Tensor | None = None, **more: Any) -> Sample:
        return replace(sample, args=(module, q, k, v, m), kwargs={**options, **more})

    if "cu_seq_lens_q" in sample.kwargs:
        bounds = (sample.kwargs[f"cu_seq_lens_{name}"].tolist() for name in "qk")
        for ((a, b), (c, d)), number in zip(zip(*map(pairwise, bounds), strict=True), range(99), strict=False):
            if b - a == d - c > 0:
                alone = call(query[:, :, a:b], key[:, :, c:d], value[:, :, c:d])
                yield Alike(f"where packed sequence {number} is alone", (sample, alone), (_at(a, b), _at()))
        return
    for row in {0, len(query) - 1} if len(query) > 1 else ():
        own = None if mask is None else mask[row % len(mask), None]
        alone = call(query[row, None], key[row, None], value[row, None], own)
        yield Alike(f"where sequence {row} is alone", (sample, alone), (_at(row=row), _at()))
    causal = module.is_causal if options.get("is_causal") is None else options["is_causal"]
    length = query.shape[2]
    if mask is not None or not causal or key.shape[2] != length:
        return
    for at in dict.fromkeys((0, length // 2, length - 1)):
        decoded = call(query[:, :, at, None], key[:, :, : at + 1], value[:, :, : at + 1])
        yield Alike(f"where query {at} is decoded", (sample, decoded), (_at(at, at + 1), _at()))

    def behind(each: Tensor) -> Tensor:
        return torch.cat((each[:, :, :1].expand(-1, -1, _BEFORE, -1) * 3, each), dim=2)

    longer, parts = (behind(query), behind(key), behind(value)), (_at(), _at(_BEFORE))
    if "packed" in features and len(query) == 1:
        packed = packed_of(torch.tensor([_BEFORE, length], device=query.device))
        yield Alike("where it is packed behind another", (sample, call(*longer, **packed)), parts)
    if "dense_mask" in features:
        places = torch.arange(_BEFORE + length, device=query.device)
        ahead = places[:, None] - places
        seen = (ahead >= 0) & (places >= _BEFORE) & (ahead < (options.get("sliding_window") or len(places)))
        seen = seen.expand(len(query), 1, -1, -1)
        yield Alike("where it is padded on the left", (sample, call(*longer, seen)), parts)
        added = query.new_zeros(seen.shape).masked_fill(~seen, torch.finfo(query.dtype).min)
        yield Alike("where an added mask pads it on the left", (sample, call(*longer, added)), parts)


def _at(first: int = 0, after: int | None = None, row: int | None = None) -> Callable[[Tensor], Tensor]:
    """Picks positions, and a sequence, out of an output ``[B, S, H, D]``."""
    return lambda y: y[slice(None) if row is None else slice(row, row + 1), first:after]
