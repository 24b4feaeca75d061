"""Sample calls of attention in which shapes, masks and options meet."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from veomni_ops.attention_calls import BY_LENGTHS, AttentionModule, heads_of, packed_of
from veomni_ops.combinations import together
from veomni_ops.contract import Draw, Sample, leaf
from veomni_ops.memory_places import alone


def combined_shapes(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Of each kind of mask, shapes without options, and then with some. A kernel without an option misses no shape.

    Example:
        >>> next(combined_shapes(torch.device("cpu"), torch.float32)).name
        'mask no, batch 1, heads (3, 3), lengths (40, 130), widths (40, 48), causal False, scaling 0.15'
    """
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
        _, key, value = heads_of(draw, batch, q_heads, k_heads, keys, width, value_width)
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
            kw |= packed_of(*(F.pad(each, (1, 0)).diff() for each in ends))
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


def combined_options(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Samples of options, alone and combined, all with ``values_only``.

    Kernels often have a code path per option and forget one option where two or three meet. Many samples repeat the
    shape of an earlier one with other options, which finds kernels that cache something by shape alone.

    Example:
        >>> samples = list(combined_options(torch.device("cpu"), torch.float32))
        >>> all(sample.values_only for sample in samples), max(len(sample.needs) for sample in samples)
        (True, 4)
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
        heads = heads_of(draw, batch, q_heads, k_heads, length, *widths)
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
        query, *_ = heads_of(draw, 2, 4, 2, lengths[0], 32)
        _, key, value = heads_of(draw, 2, 4, 2, lengths[1], 32)
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
        query, key, value = heads_of(draw, 2, 4, 4 // groups, length, 32)
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

    bounds = packed_of(torch.tensor([4, 1, 0, 9, 6, 1], device=device))
    along, eight = (1, 4, 2, 21), (1, 16, 2, 21)
    yield edge("packed, given scaling", "packed", shape=eight, widths=(72, 96), scaling=0.3, **bounds)
    yield edge("packed, not causal", "packed", shape=along, is_causal=False, **bounds)
    one = edge("packed, one sequence", "packed", shape=along, **packed_of(torch.tensor([21], device=device)))
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
    bounds = packed_of(torch.tensor([1, 9, 0, 4, 6, 1], device=device))
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
        "packed": packed_of(torch.tensor([5, 7], device=device)),
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
    yield edge("padding as integers", *padding, mask=padded(9, 12).long(), shape=square)
    restart = torch.arange(17).remainder(7).repeat(2, 1).to(device)  # the mask, which is none, says what is packed
    yield replace(edge("positions that restart", position_ids=restart), not_with=BY_LENGTHS)
    yield edge("groups of sixteen", shape=(1, 32, 2, 9))
    both_sides = edge("a window on both sides that hides nothing", *window, sliding_window=100, is_causal=False)
    yield replace(both_sides, only_with="sliding_window")
    every_key: dict[str, Any] = {"sliding_window": 12, "softcap": 2.0}
    yield across("a window of all keys of one query, softcap", *window, "softcap", lengths=single, **every_key)
