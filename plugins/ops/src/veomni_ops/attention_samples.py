"""Sample calls of attention: small ones, one per option and per pair of options, and larger ones."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from veomni_ops.combinations import together
from veomni_ops.contract import Alike, Draw, Sample, leaf
from veomni_ops.memory_places import alone, far_apart, has_room

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


def _heads(
    draw: Draw, batch: int, q_heads: int, k_heads: int, length: int, head: int, value_head: int | None = None
) -> tuple[Tensor, ...]:
    """Queries, keys and values as projections leave them, ``[B, H, S, D]`` in the memory of ``[B, S, H, D]``.

    ``value_head`` is the width of the values, ``head`` without it.
    """
    shapes = ((q_heads, head), (k_heads, head), (k_heads, value_head or head))
    return tuple(leaf(draw.normal(batch, length, *shape).transpose(1, 2)) for shape in shapes)


def _packed(lengths: Tensor, key_lengths: Tensor | None = None) -> dict[str, Any]:
    """The options of a varlen call with sequences of these lengths; ``key_lengths`` if the keys have other lengths."""
    pairs = (("q", lengths), ("k", lengths if key_lengths is None else key_lengths))
    bounds = {name: F.pad(each.cumsum(0), (1, 0)).int() for name, each in pairs}
    return {
        **{f"cu_seq_lens_{name}": bounds[name] for name, _ in pairs},
        **{f"max_length_{name}": int(each.max()) for name, each in pairs},
    }


def dropping(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Calls that drop a quarter of the weights, of identities as values: ``output[b, s, h, l]`` is a weight, or zero.

    Example:
        >>> [sample.kwargs for sample in dropping(torch.device("cpu"), torch.float32)]
        [{'dropout': 0.25}, {'dropout': 0.25}]
    """
    draw, length = Draw(device, dtype, seed=11), 32
    identity = torch.eye(length, device=device, dtype=dtype).expand(2, 2, length, length)
    for name, is_causal in (("", False), (", causal", True)):
        query, key, _ = _heads(draw, 2, 4, 2, length, length)
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
        return (grouped, *_heads(draw, batch, 4, 2, length, 32), mask)

    yield Sample("past 128 keys", inputs(length=129))
    yield Sample("past 64 in a head", (grouped, *_heads(draw, 1, 2, 1, 37, 128), None))
    yield Sample("eight groups, heads of 192", (AttentionModule(8), *_heads(draw, 1, 8, 1, 65, 192), None))
    yield Sample("not causal, past 128 keys", inputs(), {"is_causal": False})
    unpadded = torch.ones(2, 150, dtype=torch.bool, device=device)
    unpadded[1, 131:] = False
    yield Sample("long padding mask", inputs(unpadded, batch=2), needs=("padding_mask",))
    allowed = unpadded[:, None, None, :] & torch.ones(150, 150, dtype=torch.bool, device=device).tril()
    yield Sample("long boolean mask", inputs(allowed, batch=2), needs=("dense_mask",))
    yield Sample("window past a tile", inputs(), {"sliding_window": 65}, needs=("sliding_window",))
    lengths = torch.tensor([0, 1, 165, 2, 33, 64, 0, 17, 0], device=device)
    yield Sample("nine packed sequences", inputs(length=282), _packed(lengths), needs=("packed",))
    both = {**_packed(lengths), "sliding_window": 40}
    yield Sample("nine packed sequences, window", inputs(length=282), both, needs=("packed", "sliding_window"))
    yield Sample("softcap past 128 keys", inputs(), {"softcap": 2.0, "scaling": 1.0}, needs=("softcap",))
    yield Sample("sinks past 128 keys", inputs(), {"s_aux": leaf(draw.normal(4))}, needs=("sinks",))
    bias = {"position_bias": leaf(draw.normal(1, 4, 150, 150))}
    yield Sample("position bias past 128 keys", inputs(), bias, needs=("position_bias",))
    twenty = _packed(torch.full((20,), 2, device=device))
    yield Sample("twenty packed sequences", inputs(length=40), twenty, needs=("packed",), values_only=True)
    # -128 and whole numbers, which 16 bits hold: cuDNN 9.20 gave NaN, with half a tile of 128 keys left over.
    query, key, value = (each.detach() for each in _heads(draw, 1, 4, 2, 192, 32))
    query, key = query.round(), key.round()
    query[..., :8], query[..., 11:], key[..., :8] = 16, 0, -1
    causal = torch.ones(1, 1, 192, 192, dtype=torch.bool, device=device).tril()
    low = (grouped, leaf(query), leaf(key), leaf(value), causal)
    yield Sample("logits below -88", low, {"scaling": 1.0}, needs=("dense_mask",))
    yield from _combined_shapes(device, dtype)
    hundred = _packed(torch.full((100,), 2, device=device))
    yield Sample("a hundred packed sequences", inputs(length=200), hundred, needs=("packed",))
    many = (AttentionModule(8), *_heads(draw, 1, 64, 8, 9, 32), None)
    yield Sample("sinks of 64 heads", many, {"s_aux": leaf(draw.normal(64))}, needs=("sinks",))
    of_queries = {"sinks": leaf(draw.normal(1, 4, 150, 1))}
    yield Sample("query sinks past 128 queries", inputs(), of_queries, needs=("query_sinks",))
    chosen = {"indices": (draw.normal(1, 150, 150) + 9 * torch.eye(150, device=device)).topk(100).indices}
    yield Sample("a hundred chosen keys", inputs(), chosen, needs=("chosen_keys",))
    across = (*inputs()[:2], *_heads(draw, 1, 4, 2, 20, 32)[1:], None)
    yield Sample("150 queries of 20 keys", across, {"is_causal": False})
    bounds = _packed(*(torch.tensor(each, device=device) for each in ((88, 62), (5, 15))))
    yield Sample("packed, more queries than keys", across, {**bounds, "is_causal": False}, needs=("packed",))
    query, keys, last = leaf(draw.normal(1, 1, 2, 16)), draw.normal(1, 1, 65600, 16), torch.arange(65600, device=device)
    far = (AttentionModule(1), query, keys, keys, (last > 65500).expand(1, 1, 2, -1))
    yield Sample("a mask past 2**16 keys", far, needs=("dense_mask",))


def _combined_shapes(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Of each kind of mask, shapes without options, and then with some. A kernel without an option misses no shape."""
    draw = Draw(device, dtype, seed=8)

    def make(
        mask: str,
        batch: int,
        heads: tuple[int, int],
        lengths: tuple[int, int],
        widths: tuple[int, int],
        causal: bool,
        scaling: float | None,
        options: tuple[str, ...] = (),
        window: str = "",
    ) -> Sample:
        (queries, keys), (q_heads, k_heads), (width, value_width) = lengths, heads, widths
        # Half as large, since 16 bits round the logits of a kernel that stores them, which the contract allows.
        query = leaf(draw.normal(batch, queries, q_heads, width, scale=0.5).transpose(1, 2))
        _, key, value = _heads(draw, batch, q_heads, k_heads, keys, width, value_width)
        needs: list[str] = []
        first_seen = min(70, keys - 8) if "tile" in mask else 2 if "sides" in mask else 0
        given: Tensor | None = None
        kw: dict[str, Any] = {"scaling": scaling, "is_causal": causal}
        if "boolean" in mask or "added" in mask:
            given = draw.normal(batch, q_heads if "head" in mask else 1, queries, keys).float() > 0
            given[..., first_seen], given[-1, :, 1] = True, "empty rows" not in mask
            given[..., :first_seen] = False
            given = draw.normal(*given.shape).masked_fill(~given, float("-inf")) if "added" in mask else given
            needs += ["dense_mask"]
        elif "padding" in mask:  # of three sequences, one is padding alone
            kept = torch.arange(keys, device=device) < torch.tensor([[keys - 3], [0], [keys]], device=device)[:batch]
            given = kept.flip(1) if "left" in mask else kept
            given[:, :first_seen] = False
            needs += ["padding_mask"]
        elif mask == "packed":
            ends = [torch.tensor([0, 2, 2, each - 1, each, each], device=device) for each in lengths]
            kw |= _packed(*(F.pad(each, (1, 0)).diff() for each in ends))
            needs += ["packed"]
        if "window" in options:
            # One that hides something, since kernels without windows may take another for none. Without causal
            # attention, windows have no meaning across: there is no query's own key.
            kw["sliding_window"] = {"long": queries - 2, "tile": 64}.get(window, 3)
            needs += ["sliding_window"]
            kw["is_causal"] = causal = causal or queries < keys
        if "softcap" in options:
            kw["softcap"], needs = 2.0, [*needs, "softcap"]
            needs += ["softcap_by_lengths"] if "padding_mask" in needs or "packed" in needs else []
        if "sinks" in options:
            kw["s_aux"], needs = leaf(draw.normal(q_heads)), [*needs, "sinks"]
        if "bias" in options:
            kw["position_bias"], needs = leaf(draw.normal(1, q_heads, queries, keys)), [*needs, "position_bias"]
        first = causal and given is None and mask == "no" and queries < keys
        module = AttentionModule(q_heads // k_heads, from_the_first_key=first)
        sizes = {"head_dim": widths[:1], "value_head_dim": widths[1:]}
        not_with = BY_LENGTHS if first else ""
        return Sample("", (module, query, key, value, given), kw, tuple(needs), sizes=sizes, not_with=not_with)

    dense = ("boolean", "boolean per head", "boolean, empty rows", "added", "added per head")
    both = {"causal": (True, False), "scaling": (None, 0.15)}
    several = [each for count in (1, 2, 3) for each in combinations(("window", "softcap", "sinks"), count)]
    for masks in (("no",), dense, ("padding", "padding left"), ("packed",)):
        batch = (1,) if masks == ("packed",) else (1, 3)
        heads, lengths = ((3, 3), (6, 2), (16, 1)), ((12, 12), (40, 130), (128, 128))
        shapes: dict[str, Any] = {"mask": masks, "batch": batch, "heads": heads, "lengths": lengths}
        yield from together(make, **shapes, widths=((80, 80), (96, 64), (40, 48)), **both)
        shapes |= {"heads": heads[::2], "lengths": (*lengths[:2], (70, 70)), "widths": ((80, 80), (40, 48))}
        options = [each for each in several if masks != dense or "window" not in each]
        yield from together(make, **shapes, **both, options=options, window=("short", "long"))
        if masks in (("no",), dense):
            yield from together(make, **shapes | {"mask": masks[:2]}, **both, options=(("bias",),))
    # Widths that many kernels have code of their own for, and masks that hide a whole tile.
    shapes = {"heads": ((12, 2),), "lengths": ((40, 130), (90, 90)), "widths": ((128, 128), (64, 64)), **both}
    padding = ("padding", "padding on both sides", "padding of a tile")
    tile = ("boolean after a tile", "added after a tile")
    for kinds in (("no",), tile, padding, ("packed",)):
        shapes |= {"mask": kinds, "batch": (1,) if kinds == ("packed",) else (1, 3)}
        options = [(), *several[kinds == tile : 3], ("softcap", "sinks")]
        yield from together(make, **shapes, options=options)
    # Heads of models, with and without rows left over from whole tiles.
    widths = ((256, 256), (192, 128), (128, 128), (64, 64))
    shapes = {"batch": (1,), "heads": ((8, 2),), "lengths": ((70, 70), (128, 128)), "widths": widths}
    shapes |= {"causal": (True,), "scaling": (None,)}
    options = [(), *several[:3], ("window", "sinks")]
    yield from together(make, mask=("no",), **shapes, options=options, window=("short", "tile"))
    yield from together(make, mask=("padding left", "packed"), **shapes)


def large(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Calls of models' sizes, with the arguments of :func:`samples`.

    Example:
        >>> sample = next(large(torch.device("cpu"), torch.bfloat16))
        >>> sample.name, sample.args[1].shape
        ("a model's heads", torch.Size([2, 16, 1027, 128]))
    """
    draw = Draw(device, dtype)
    module = AttentionModule(4)
    query, key, value = _heads(draw, 2, 16, 4, 1027, 128)
    # A causal row averages over all keys up to its own, so its output would shrink with its position. With values that
    # grow by position and nearly uniform weights, all rows are of one magnitude. Otherwise the tolerance would be far
    # too loose for rows with many keys, and rows with few keys would exceed it by rounding alone.
    growing = torch.arange(1, 1028, device=device).sqrt().to(dtype)[:, None]
    yield Sample("a model's heads", (module, leaf(query.detach() / 2), key, leaf(value.detach() * growing), None))
    lengths = draw.integers(100, 40, low=1)
    inputs = (module, *_heads(draw, 1, 8, 2, int(lengths.sum()), 64), None)
    yield Sample("40 packed sequences", inputs, _packed(lengths), needs=("packed",))
    inputs = (module, *_heads(draw, 1, 4, 1, 2053, 64), None)
    yield Sample("window of 512", inputs, {"sliding_window": 512}, needs=("sliding_window",))
    if has_room(device, dtype):
        query, key, value = _heads(draw, 2, 4, 1, 65, 64)
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
    heads = functools.partial(_heads, draw)
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
    packed = _packed(lengths)
    yield Sample("packed sequences", (grouped, *heads(1, 4, 2, 21, 112), None), packed, needs=("packed",))
    both = {**packed, **window}
    needs = ("packed", "sliding_window")
    fewer = torch.tensor([3, 0, 0, 3, 4], device=device)[order]
    query, *_ = heads(1, 4, 2, 10, 32)
    _, key, value = heads(1, 4, 2, 21, 32)
    last = _packed(fewer, lengths)
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
    yield from _combined_options(device, dtype)


def _widths(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Samples of widths and of heads in groups, and keys that are the values, all with ``values_only``."""
    draw = Draw(device, dtype, seed=5)

    def of(name: str, shape: Any, *needs: str) -> Sample:
        heads = _heads(draw, *shape)
        return Sample(name, (AttentionModule(shape[1] // shape[2]), *heads, None), needs=needs, values_only=True)

    yield of("values wider than queries", (3, 4, 2, 17, 72, 96))
    yield of("past 64 keys", (1, 2, 1, 65, 80))
    yield of("widths that are no multiples of 8", (2, 2, 1, 9, 36, 20), "odd_heads")
    (query,) = _heads(draw, 1, 16, 2, 9, 96)[:1]
    (latent,) = _heads(draw, 1, 2, 2, 9, 96)[:1]
    yield Sample("a key that is the value", (AttentionModule(8), alone(query), latent, latent, None), values_only=True)
    query, latent, _ = _heads(draw, 1, 2, 2, 9, 80)
    yield Sample(
        "ungrouped keys that are the values", (AttentionModule(1), query, latent, latent, None), values_only=True
    )
    query, latent, _ = _heads(draw, 1, 16, 1, 7, 576)
    cut = leaf(latent.detach()[..., :512])  # in the key's memory
    yield Sample(
        "latent heads", (AttentionModule(16), query, latent, cut, None), needs=("wide_heads",), values_only=True
    )


def _combined_options(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Samples of options, alone and combined, all with ``values_only``.

    Kernels often have a code path per option and forget one option where two or three meet. Many samples repeat the
    shape of an earlier one with other options, which finds kernels that cache something by shape alone.
    """
    draw = Draw(device, dtype, seed=4)

    def edge(
        name: str,
        *needs: str,
        mask: Tensor | None = None,
        shape: Any = (2, 4, 2, 17),
        widths: tuple[int, int] = (32, 32),
        causal: bool = True,
        **kw: Any,
    ) -> Sample:
        batch, q_heads, k_heads, length = shape
        heads = _heads(draw, batch, q_heads, k_heads, length, *widths)
        call = (AttentionModule(q_heads // k_heads, causal), *heads, mask)
        sizes = {"head_dim": widths[:1], "value_head_dim": widths[1:]}
        return Sample(name, call, kw, needs, values_only=True, sizes=sizes)

    def across(
        name: str,
        *needs: str,
        mask: Tensor | None = None,
        causal: bool = True,
        first: bool = False,
        lengths: tuple[int, int] = (5, 12),
        **kw: Any,
    ) -> Sample:
        query, *_ = _heads(draw, 2, 4, 2, lengths[0], 32)
        _, key, value = _heads(draw, 2, 4, 2, lengths[1], 32)
        module = AttentionModule(2, causal, from_the_first_key=first)
        aligned = causal and mask is None and lengths[0] > 1  # a single query sees all keys
        only_with, not_with = ("", BY_LENGTHS) if first else (BY_LENGTHS if aligned else "", "")
        call = (module, query, key, value, mask)
        return Sample(name, call, kw, needs, values_only=True, only_with=only_with, not_with=not_with)

    def padded(*lengths: int) -> Tensor:
        return torch.arange(12, device=device) < torch.tensor(lengths, device=device)[:, None]

    def sinks(heads: int = 4) -> Tensor:
        return leaf(draw.normal(heads))

    yield edge("not causal at a shape seen before", is_causal=False)
    yield edge("causal, as the call says", causal=False, is_causal=True)
    yield edge("one key head, given scaling", shape=(2, 8, 1, 17), widths=(80, 80), scaling=0.3)
    yield edge("groups of three", shape=(3, 6, 2, 9), widths=(112, 112))

    def one_key(name: str, *needs: str, length: int, groups: int = 2, **kw: Any) -> Sample:
        """A single key's weight is 1, so query and key get no gradient but rounding noise; they are detached."""
        query, key, value = _heads(draw, 2, 4, 4 // groups, length, 32)
        return Sample(
            name, (AttentionModule(groups), query.detach(), key.detach(), value, None), kw, needs, values_only=True
        )

    yield one_key("one token", length=1)
    yield across("the last queries")
    yield across("the first queries, of keys that are not written yet", first=True)
    yield across("more queries than keys", first=True, lengths=(12, 5))
    yield across("across, not causal", causal=False)

    some = draw.normal(2, 4, 12, 12).float() > 0
    some |= torch.eye(12, dtype=torch.bool, device=device)  # a row without any key would give NaN
    without = some[:, :1].clone()  # with sinks, such a row is zeros
    without[0, :, 5], without[1] = False, False
    dense, square = ("dense_mask",), (2, 4, 2, 12)
    yield edge("a mask for each head, given scaling", *dense, mask=some, shape=square, scaling=0.3)
    yield edge("another mask at a shape seen before", *dense, mask=some[:, :1], shape=square)
    yield across("a mask of fewer queries", *dense, mask=some[:, :1, -5:])
    lowest = torch.zeros(2, 1, 12, 12, device=device, dtype=dtype).masked_fill(~without, torch.finfo(dtype).min)
    yield edge("an added mask, rows without keys", *dense, mask=lowest, shape=square, widths=(96, 96))
    yield edge("mask and softcap", *dense, "softcap", mask=some[:, :1], shape=square, softcap=2.0)
    yield edge("mask and sinks", *dense, "sinks", mask=without, shape=square, s_aux=sinks())
    three: dict[str, Any] = {"softcap": 2.0, "s_aux": sinks(), "scaling": 0.5}
    yield edge("mask, softcap and sinks", *dense, "softcap", "sinks", mask=some, shape=square, **three)

    padding, capped = ("padding_mask",), ("softcap", "softcap_by_lengths")
    yield edge("other padding at a shape seen before", *padding, mask=padded(4, 12), shape=square, scaling=0.3)
    yield edge("padding, not causal", *padding, mask=padded(12, 4), shape=square, is_causal=False)
    on_the_left = padded(4, 12, 0).flip(1)  # and a sequence of padding alone
    yield edge("padding on the left", *padding, mask=on_the_left, shape=(3, 4, 2, 12))
    beside = (*padding, "sliding_window")
    yield edge("padding and window", *beside, mask=padded(11, 8), shape=square, sliding_window=3)
    yield edge("padding and softcap", *padding, *capped, mask=padded(11, 8), shape=square, softcap=2.0)
    yield edge("padding and sinks", *padding, "sinks", mask=padded(11, 8), shape=square, s_aux=sinks())
    left: dict[str, Any] = {"mask": padded(5, 12).flip(1), "shape": (2, 8, 1, 12), "widths": (72, 72)}
    yield edge("padding, window and softcap", *beside, *capped, sliding_window=4, softcap=2.0, **left)
    yield edge("padding, window and sinks", *beside, "sinks", sliding_window=12, s_aux=sinks(8), **left)

    window = ("sliding_window",)
    yield edge("a window at a shape seen before, given scaling", *window, sliding_window=4, scaling=0.3)
    yield one_key("a window of one key", *window, length=17, sliding_window=1)
    yield edge("a window on both sides", *window, sliding_window=3, is_causal=False)
    yield across("a window of the last queries", *window, sliding_window=4)
    yield across("a window of the first queries", *window, first=True, sliding_window=4)
    yield edge("window and softcap", *window, "softcap", sliding_window=5, softcap=2.0)
    yield edge("window and sinks", *window, "sinks", sliding_window=5, s_aux=sinks())
    yield edge("window, softcap and sinks", *window, "softcap", "sinks", sliding_window=5, softcap=2.0, s_aux=sinks())
    # Some kernels take a window that hides nothing for none, which is right. What they can't take comes with it.
    yield edge("a window as long as the sequence, softcap", *window, "softcap", sliding_window=17, softcap=2.0)
    yield edge("a window longer than the sequence, sinks", *window, "sinks", sliding_window=100, s_aux=sinks())
    for length in (17, 100):
        alone_there = edge(f"a window of {length} for 17 keys", *window, sliding_window=length)
        yield replace(alone_there, only_with="sliding_window")

    bounds = _packed(torch.tensor([4, 1, 0, 9, 6, 1], device=device))
    along, eight = (1, 4, 2, 21), (1, 16, 2, 21)
    yield edge("packed, given scaling", "packed", shape=eight, widths=(72, 96), scaling=0.3, **bounds)
    yield edge("packed, not causal", "packed", shape=along, is_causal=False, **bounds)
    one = edge("packed, one sequence", "packed", shape=along, **_packed(torch.tensor([21], device=device)))
    module, *heads, _ = one.args
    yield replace(one, args=(module, *map(alone, heads), None))
    yield edge("packed, softcap", "packed", *capped, shape=along, softcap=2.0, **bounds)
    yield edge("packed, sinks", "packed", "sinks", shape=along, s_aux=sinks(), **bounds)
    few, many = {"sliding_window": 3, **bounds}, {"sliding_window": 50, **bounds}
    yield edge("packed, a long window", "packed", *window, shape=along, **many)
    yield edge("packed, a window on both sides", "packed", *window, shape=along, is_causal=False, **few)
    yield edge("packed, window and softcap", "packed", *window, *capped, shape=along, softcap=2.0, **few)
    yield edge("packed, window and sinks", "packed", *window, "sinks", shape=eight, s_aux=sinks(16), **few)
    yield edge("softcap alone", "softcap", softcap=1.0)
    yield edge("softcap and sinks", "softcap", "sinks", widths=(96, 64), softcap=2.0, s_aux=sinks())
    yield edge("sinks, not causal, given scaling", "sinks", s_aux=sinks(), is_causal=False, scaling=0.1)
    last = leaf(draw.normal(1, 4, 5, 12))
    yield across("position bias of the last queries", "position_bias", position_bias=last)

    draw = Draw(device, dtype, seed=6)
    yield one_key("one token of ungrouped heads", length=1, groups=1)  # whose result is the value
    yield edge("heads of 256", shape=(1, 2, 1, 9), widths=(256, 256))
    numbers = draw.normal(2, 4, 12, 12).masked_fill(~some, float("-inf"))
    yield edge("an added mask of numbers for each head", *dense, mask=numbers, shape=square)
    yield across("padding of the last queries", *padding, mask=on_the_left[:2])
    single = (1, 12)
    yield across("a mask of one query", *dense, mask=some[:, :, 7:8], lengths=single)
    yield across("padding of one query", *padding, mask=on_the_left[:2], lengths=single)
    yield across("a window of one query", *window, sliding_window=4, lengths=single)
    yield across("softcap and sinks of one query", "softcap", "sinks", lengths=single, softcap=2.0, s_aux=sinks())
    outer = sinks().detach()
    outer[0], outer[1] = 100.0, -100.0  # past where float32's exponential ends
    yield edge("a high and a low sink", "sinks", s_aux=leaf(outer))
    yield edge("an added mask, rows that see sinks alone", *dense, "sinks", mask=lowest, shape=square, s_aux=sinks())
    chosen = (draw.normal(2, 12, 12) + 9 * torch.eye(12, device=device)).topk(5).indices
    yield edge("chosen keys and a mask", *dense, "chosen_keys", mask=some[:, :1], shape=square, indices=chosen)
    of_queries = leaf(draw.normal(2, 4, 12, 1))
    yield edge("query sinks and a mask", *dense, "query_sinks", mask=some[:, :1], shape=square, sinks=of_queries)
    of_queries = leaf(draw.normal(2, 4, 12, 1))
    yield edge("query sinks and a window", *window, "query_sinks", sliding_window=5, shape=square, sinks=of_queries)
    # As earlier ones, but for what is seen: a kernel may keep what it made of a mask or of lengths.
    yield edge("the next batch's mask", *dense, mask=some[:, 1:2], shape=square)
    yield edge("the next batch's padding", *padding, mask=padded(9, 12), shape=square, is_causal=False)
    bounds = _packed(torch.tensor([1, 9, 0, 4, 6, 1], device=device))
    yield edge("the next batch's sequences", "packed", shape=along, is_causal=False, **bounds)
    yield edge("heads of 256, two sequences", shape=(2, 2, 1, 9), widths=(256, 256))
    between = padded(12, 9) & (torch.arange(12, device=device) != 5)
    yield edge("padding between tokens", *padding, mask=between, shape=square)
    given: dict[str, Any] = {
        "chosen_keys": {"indices": chosen[:1]},
        "query_sinks": {"sinks": leaf(draw.normal(1, 4, 12, 1))},
        "position_bias": {"position_bias": leaf(draw.normal(1, 4, 12, 12))},
        "padding_mask": {"mask": padded(7).flip(1)},
        "sliding_window": {"sliding_window": 3},
        "packed": _packed(torch.tensor([5, 7], device=device)),
        "dense_mask": {"mask": numbers[:1]},
        "sinks": {"s_aux": sinks()},
    }
    for one_of, other in combinations(given, 2):  # of the first three and all; sinks of both kinds have no meaning
        if one_of in [*given][:3] and (one_of, other) != ("query_sinks", "sinks"):
            name = f"{one_of} and {other} alone".replace("_", " ")
            yield edge(name, one_of, other, shape=(1, 4, 2, 12), **given[one_of], **given[other])
    yield edge("a mask that the batch shares", *dense, mask=some[:1, :1].expand(2, -1, -1, -1), shape=square)
    yield edge("a mask that heads share", *dense, mask=some[:, :1].expand(-1, 4, -1, -1), shape=square)
    unread: dict[str, Any] = {"position_ids": torch.arange(17, device=device).repeat(2, 1), "use_cache": False}
    yield edge("what else transformers passes", output_attentions=False, dropout=0.0, **unread)
    rounded_up = bounds | {"max_length_q": 32, "max_length_k": 32}
    yield edge("packed, lengths below the maximum", "packed", shape=along, **rounded_up)


_ALIKE_OPTIONS = {"scaling", "softcap", "s_aux", "sliding_window", "is_causal"}
_BEFORE = 5  # positions of padding, or of another sequence


def alike(sample: Sample, features: Collection[str]) -> Iterator[Alike]:
    """Each sequence alone, token by token, padded on the left, and packed behind another.

    Args:
        sample: a call of those above.
        features: what the kernel declares.

    Example:
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
        packed = _packed(torch.tensor([_BEFORE, length], device=query.device))
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
