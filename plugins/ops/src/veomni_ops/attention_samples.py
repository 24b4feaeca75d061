"""Sample calls of attention: small ones, larger ones, and those of models' sizes."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from veomni_ops.attention_calls import AttentionModule, heads_of, packed_of
from veomni_ops.attention_combinations import combined_options, combined_shapes
from veomni_ops.contract import Draw, Sample, leaf
from veomni_ops.memory_places import alone, far_apart, has_room


def dropping(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Calls that drop a quarter of the weights, of identities as values: ``output[b, s, h, l]`` is a weight, or zero.

    Example:
        >>> [sample.kwargs for sample in dropping(torch.device("cpu"), torch.float32)]
        [{'dropout': 0.25}, {'dropout': 0.25}]
    """
    draw, length = Draw(device, dtype, seed=11), 32
    identity = torch.eye(length, device=device, dtype=dtype).expand(2, 2, length, length)
    for name, is_causal in (("", False), (", causal", True)):
        query, key, _ = heads_of(draw, 2, 4, 2, length, length)
        module = AttentionModule(2, is_causal=is_causal)
        yield Sample(f"dropout{name}", (module, query, key, leaf(identity.clone()), None), {"dropout": 0.25})


def beyond_a_tile(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Calls that are larger than one tile of a kernel, with the arguments of :func:`samples`.

    Example:
        >>> [s.name for s in beyond_a_tile(torch.device("cpu"), torch.float32) if "packed" in s.needs][:2]
        ['nine packed sequences', 'nine packed sequences, window']
    """
    draw = Draw(device, dtype, seed=2)
    grouped = AttentionModule(2)

    def inputs(mask: Tensor | None = None, batch: int = 1, length: int = 150) -> tuple[Any, ...]:
        return (grouped, *heads_of(draw, batch, 4, 2, length, 32), mask)

    yield Sample("past 128 keys", inputs(length=129))
    yield Sample("past 64 in a head", (grouped, *heads_of(draw, 1, 2, 1, 37, 128), None))
    yield Sample("eight groups, heads of 192", (AttentionModule(8), *heads_of(draw, 1, 8, 1, 65, 192), None))
    yield Sample("not causal, past 128 keys", inputs(), {"is_causal": False})
    unpadded = torch.ones(2, 150, dtype=torch.bool, device=device)
    unpadded[1, 131:] = False
    yield Sample("long padding mask", inputs(unpadded, batch=2), needs=("padding_mask",))
    allowed = unpadded[:, None, None, :] & torch.ones(150, 150, dtype=torch.bool, device=device).tril()
    yield Sample("long boolean mask", inputs(allowed, batch=2), needs=("dense_mask",))
    yield Sample("window past a tile", inputs(), {"sliding_window": 65}, needs=("sliding_window",))
    lengths = torch.tensor([0, 1, 165, 2, 33, 64, 0, 17, 0], device=device)
    yield Sample("nine packed sequences", inputs(length=282), packed_of(lengths), needs=("packed",))
    both = {**packed_of(lengths), "sliding_window": 40}
    yield Sample("nine packed sequences, window", inputs(length=282), both, needs=("packed", "sliding_window"))
    yield Sample("softcap past 128 keys", inputs(), {"softcap": 2.0, "scaling": 1.0}, needs=("softcap",))
    yield Sample("sinks past 128 keys", inputs(), {"s_aux": leaf(draw.normal(4))}, needs=("sinks",))
    bias = {"position_bias": leaf(draw.normal(1, 4, 150, 150))}
    yield Sample("position bias past 128 keys", inputs(), bias, needs=("position_bias",))
    twenty = packed_of(torch.full((20,), 2, device=device))
    yield Sample("twenty packed sequences", inputs(length=40), twenty, needs=("packed",), values_only=True)
    # -128 and whole numbers, which 16 bits hold: cuDNN 9.20 gave NaN, with half a tile of 128 keys left over.
    query, key, value = (each.detach() for each in heads_of(draw, 1, 4, 2, 192, 32))
    query, key = query.round(), key.round()
    query[..., :8], query[..., 11:], key[..., :8] = 16, 0, -1
    causal = torch.ones(1, 1, 192, 192, dtype=torch.bool, device=device).tril()
    low = (grouped, leaf(query), leaf(key), leaf(value), causal)
    yield Sample("logits below -88", low, {"scaling": 1.0}, needs=("dense_mask",))
    yield from combined_shapes(device, dtype)
    hundred = packed_of(torch.full((100,), 2, device=device))
    yield Sample("a hundred packed sequences", inputs(length=200), hundred, needs=("packed",))
    many = (AttentionModule(8), *heads_of(draw, 1, 64, 8, 9, 32), None)
    yield Sample("sinks of 64 heads", many, {"s_aux": leaf(draw.normal(64))}, needs=("sinks",))
    of_queries = {"sinks": leaf(draw.normal(1, 4, 150, 1))}
    yield Sample("query sinks past 128 queries", inputs(), of_queries, needs=("query_sinks",))
    chosen = {"indices": (draw.normal(1, 150, 150) + 9 * torch.eye(150, device=device)).topk(100).indices}
    yield Sample("a hundred chosen keys", inputs(), chosen, needs=("chosen_keys",))
    across = (*inputs()[:2], *heads_of(draw, 1, 4, 2, 20, 32)[1:], None)
    yield Sample("150 queries of 20 keys", across, {"is_causal": False})
    bounds = packed_of(*(torch.tensor(each, device=device) for each in ((88, 62), (5, 15))))
    yield Sample("packed, more queries than keys", across, {**bounds, "is_causal": False}, needs=("packed",))
    query, keys, last = leaf(draw.normal(1, 1, 2, 16)), draw.normal(1, 1, 65600, 16), torch.arange(65600, device=device)
    far = (AttentionModule(1), query, keys, keys, (last > 65500).expand(1, 1, 2, -1))
    yield Sample("a mask past 2**16 keys", far, needs=("dense_mask",))
    bounds = packed_of(*(torch.tensor(each, device=device) for each in ((50, 88, 12), (12, 0, 8))))
    yield Sample("packed, a sequence without keys", across, {**bounds, "is_causal": False}, needs=("packed",))


def large(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Calls of models' sizes, with the arguments of :func:`samples`.

    Example:
        >>> sample = next(large(torch.device("cpu"), torch.bfloat16))
        >>> sample.name, sample.args[1].shape
        ("a model's heads", torch.Size([2, 16, 1027, 128]))
    """
    draw = Draw(device, dtype)
    module = AttentionModule(4)
    query, key, value = heads_of(draw, 2, 16, 4, 1027, 128)
    # A causal row averages over all keys up to its own, so its output would shrink with its position. With values that
    # grow by position and nearly uniform weights, all rows are of one magnitude. Otherwise the tolerance would be far
    # too loose for rows with many keys, and rows with few keys would exceed it by rounding alone.
    growing = torch.arange(1, 1028, device=device).sqrt().to(dtype)[:, None]
    yield Sample("a model's heads", (module, leaf(query.detach() / 2), key, leaf(value.detach() * growing), None))
    lengths = draw.integers(100, 40, low=1)
    inputs = (module, *heads_of(draw, 1, 8, 2, int(lengths.sum()), 64), None)
    yield Sample("40 packed sequences", inputs, packed_of(lengths), needs=("packed",))
    inputs = (module, *heads_of(draw, 1, 4, 1, 2053, 64), None)
    yield Sample("window of 512", inputs, {"sliding_window": 512}, needs=("sliding_window",))
    if has_room(device, dtype):
        query, key, value = heads_of(draw, 2, 4, 1, 65, 64)
        inputs = (module, query, key, value, None)
        yield Sample("queries past 2**31 elements", inputs, laid_out=_queries_far_apart)


def _queries_far_apart(sample: Sample) -> Sample:
    module, query, *others = sample.args
    return replace(sample, args=(module, far_apart(query), *others))


def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Small calls, each named after what is particular about it.

    Args:
        device: where the samples' tensors are.
        dtype: their dtype.

    Example:
        >>> sample = next(samples(torch.device("cpu"), torch.float32))
        >>> sample.name, [tuple(x.shape) for x in sample.args[1:4]]
        ('causal, grouped heads', [(2, 4, 17, 32), (2, 2, 17, 32), (2, 2, 17, 32)])
        >>> [sample.name for sample in samples(torch.device("cpu"), torch.float32) if "sinks" in sample.needs][:3]
        ['sinks', 'mask and sinks', 'mask, softcap and sinks']
    """
    draw = Draw(device, dtype)
    heads = functools.partial(heads_of, draw)
    grouped, plain = AttentionModule(2), AttentionModule(1)
    yield Sample("causal, grouped heads", (grouped, *heads(2, 4, 2, 17, 32), None))
    yield Sample("values narrower than queries", (plain, *heads(3, 2, 2, 9, 192, 128), None))
    yield Sample("given scaling", (plain, *heads(1, 2, 2, 9, 80), None), {"scaling": 0.25})
    allowed = torch.ones(2, 1, 12, 12, dtype=torch.bool, device=device).tril()
    allowed[1, :, :, 8:] = False
    yield Sample("boolean mask", (grouped, *heads(2, 4, 2, 12, 96), allowed), needs=("dense_mask",))
    added = torch.zeros(2, 1, 12, 12, device=device, dtype=dtype).masked_fill(~allowed, torch.finfo(dtype).min)
    yield Sample("added mask", (grouped, *heads(2, 4, 2, 12, 72), added), needs=("dense_mask",))
    not_causal = AttentionModule(1, is_causal=False)
    yield Sample("not causal", (not_causal, *heads(2, 2, 2, 11, 112), None))
    query, *_ = heads(2, 2, 2, 1, 32)
    _, key, value = heads(2, 2, 2, 6, 32)
    yield Sample("one query of many keys", (plain, query, key, value, None))
    unpadded = torch.ones(2, 12, dtype=torch.bool, device=device)
    unpadded[1, 9:] = False
    yield Sample("padding mask", (grouped, *heads(2, 4, 2, 12, 80), unpadded), needs=("padding_mask",))
    crossing = (not_causal, *heads(2, 2, 2, 7, 32)[:1], *heads(2, 2, 2, 12, 32)[1:], unpadded)
    yield Sample("padding mask, across", crossing, needs=("padding_mask",))
    window = {"sliding_window": 5}
    yield Sample("sliding window", (grouped, *heads(2, 4, 2, 19, 96), None), window, needs=("sliding_window",))
    order = Draw(device, torch.float32, seed=1).normal(5).argsort()
    lengths = torch.tensor([5, 1, 0, 3, 12], device=device)[order]
    packed = packed_of(lengths)
    yield Sample("packed sequences", (grouped, *heads(1, 4, 2, 21, 112), None), packed, needs=("packed",))
    both = {**packed, **window}
    needs = ("packed", "sliding_window")
    fewer = torch.tensor([3, 0, 0, 3, 4], device=device)[order]
    query, *_ = heads(1, 4, 2, 10, 32)
    _, key, value = heads(1, 4, 2, 21, 32)
    last = packed_of(fewer, lengths)
    yield Sample("packed, the last queries", (grouped, query, key, value, None), last, needs=("packed",))
    yield Sample("packed, sliding window", (grouped, *heads(1, 4, 2, 21, 32), None), both, needs=needs)
    capped = {"softcap": 2.0, "scaling": 1.0}
    yield Sample("softcap", (grouped, *heads(2, 4, 2, 13, 32), None), capped, needs=("softcap",))
    sinks = {"s_aux": leaf(draw.normal(8))}
    yield Sample("sinks", (AttentionModule(8), *heads(2, 8, 1, 13, 32), None), sinks, needs=("sinks",))
    yield Sample("not causal, as the call says", (grouped, *heads(2, 4, 2, 11, 32), None), {"is_causal": False})
    query_sinks = {"sinks": leaf(draw.normal(2, 4, 13, 1))}
    yield Sample("query sinks", (grouped, *heads(2, 4, 2, 13, 32), None), query_sinks, needs=("query_sinks",))
    bias = {"position_bias": leaf(draw.normal(2, 4, 12, 12)), "scaling": 1.0}
    yield Sample("position bias", (grouped, *heads(2, 4, 2, 12, 32), None), bias, needs=("position_bias",))
    both_kinds = ("dense_mask", "position_bias")
    bias = {"position_bias": leaf(draw.normal(2, 2, 12, 12))}
    yield Sample("position bias, boolean mask", (plain, *heads(2, 2, 2, 12, 32), allowed), bias, needs=both_kinds)
    preferred = draw.normal(2, 12, 12) + 9 * torch.eye(12, device=device, dtype=dtype)  # each query sees its own key
    chosen = {"indices": preferred.topk(5).indices}
    yield Sample("chosen keys", (grouped, *heads(2, 4, 2, 12, 32), None), chosen, needs=("chosen_keys",))
    every = {"indices": draw.normal(2, 12, 12).argsort()}
    yield Sample("every key chosen", (grouped, *heads(2, 4, 2, 12, 32), None), every, needs=("chosen_keys",))
    yield from _widths(device, dtype)
    yield from combined_options(device, dtype)


def _widths(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Samples of widths and of heads in groups, and keys that are the values, all with ``values_only``."""
    draw = Draw(device, dtype, seed=5)

    def of(name: str, shape: Any, *needs: str) -> Sample:
        heads = heads_of(draw, *shape)
        return Sample(name, (AttentionModule(shape[1] // shape[2]), *heads, None), needs=needs, values_only=True)

    yield of("values wider than queries", (3, 4, 2, 17, 72, 96))
    yield of("past 64 keys", (1, 2, 1, 65, 80))
    yield of("widths that are no multiples of 8", (2, 2, 1, 9, 36, 20), "odd_heads")
    (query,) = heads_of(draw, 1, 16, 2, 9, 96)[:1]
    (latent,) = heads_of(draw, 1, 2, 2, 9, 96)[:1]
    yield Sample("a key that is the value", (AttentionModule(8), alone(query), latent, latent, None), values_only=True)
    query, latent, _ = heads_of(draw, 1, 2, 2, 9, 80)
    yield Sample(
        "ungrouped keys that are the values", (AttentionModule(1), query, latent, latent, None), values_only=True
    )
    query, latent, _ = heads_of(draw, 1, 16, 1, 7, 576)
    cut = leaf(latent.detach()[..., :512])  # in the key's memory
    yield Sample(
        "latent heads", (AttentionModule(16), query, latent, cut, None), needs=("wide_heads",), values_only=True
    )
