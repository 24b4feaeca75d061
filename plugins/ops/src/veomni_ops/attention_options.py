"""Sample calls of attention for values and gradients alone: widths, and options that meet."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from veomni_ops.attention_calls import AttentionModule, bounds_of, heads_of
from veomni_ops.contract import Draw, Sample, leaf
from veomni_ops.places import alone


def widths(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
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
    query, latent, _ = heads_of(draw, 1, 16, 1, 7, 576)
    cut = leaf(latent.detach()[..., :512])  # in the key's memory
    yield Sample(
        "latent heads", (AttentionModule(16), query, latent, cut, None), needs=("wide_heads",), values_only=True
    )


def combined_options(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
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
        call = (AttentionModule(shape[1] // shape[2], causal), *heads_of(draw, *shape, *widths), mask)
        return Sample(name, call, kw, needs, values_only=True)

    def across(name: str, *needs: str, mask: Tensor | None = None, causal: bool = True, **kw: Any) -> Sample:
        query, *_ = heads_of(draw, 2, 4, 2, 5, 32)
        _, key, value = heads_of(draw, 2, 4, 2, 12, 32)
        return Sample(name, (AttentionModule(2, causal), query, key, value, mask), kw, needs, values_only=True)

    def padded(*lengths: int) -> Tensor:
        return torch.arange(12, device=device) < torch.tensor(lengths, device=device)[:, None]

    def sinks(heads: int = 4) -> Tensor:
        return leaf(draw.normal(heads))

    yield edge("not causal at a shape seen before", is_causal=False)
    yield edge("causal, as the call says", causal=False, is_causal=True)
    yield edge("one key head, given scaling", shape=(2, 8, 1, 17), widths=(80, 80), scaling=0.3)
    yield edge("groups of three", shape=(3, 6, 2, 9), widths=(112, 112))

    def one_key(name: str, *needs: str, length: int, **kw: Any) -> Sample:
        """A single key's weight is 1, so query and key get no gradient but rounding noise; they are detached."""
        query, key, value = heads_of(draw, 2, 4, 2, length, 32)
        return Sample(
            name, (AttentionModule(2), query.detach(), key.detach(), value, None), kw, needs, values_only=True
        )

    yield one_key("one token", length=1)
    yield across("the last queries")
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
    three = {"softcap": 2.0, "s_aux": sinks(), "scaling": 0.5}
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
    left = {"mask": padded(5, 12).flip(1), "shape": (2, 8, 1, 12), "widths": (72, 72)}
    yield edge("padding, window and softcap", *beside, *capped, sliding_window=4, softcap=2.0, **left)
    yield edge("padding, window and sinks", *beside, "sinks", sliding_window=12, s_aux=sinks(8), **left)

    window = ("sliding_window",)
    yield edge("a window at a shape seen before, given scaling", *window, sliding_window=4, scaling=0.3)
    yield one_key("a window of one key", *window, length=17, sliding_window=1)
    yield edge("a window on both sides", *window, sliding_window=3, is_causal=False)
    yield across("a window of the last queries", *window, sliding_window=4)
    yield edge("window and softcap", *window, "softcap", sliding_window=5, softcap=2.0)
    yield edge("window and sinks", *window, "sinks", sliding_window=5, s_aux=sinks())
    yield edge("window, softcap and sinks", *window, "softcap", "sinks", sliding_window=5, softcap=2.0, s_aux=sinks())
    # Some kernels take a window that hides nothing for none, which is right. What they can't take comes with it.
    yield edge("a window as long as the sequence, softcap", *window, "softcap", sliding_window=17, softcap=2.0)
    yield edge("a window longer than the sequence, sinks", *window, "sinks", sliding_window=100, s_aux=sinks())

    bounds = bounds_of(torch.tensor([4, 1, 0, 9, 6, 1], device=device))
    along, eight = (1, 4, 2, 21), (1, 8, 1, 21)
    yield edge("packed, given scaling", "packed", shape=eight, widths=(72, 96), scaling=0.3, **bounds)
    yield edge("packed, not causal", "packed", shape=along, is_causal=False, **bounds)
    one = edge("packed, one sequence", "packed", shape=along, **bounds_of(torch.tensor([21], device=device)))
    module, *heads, _ = one.args
    yield replace(one, args=(module, *map(alone, heads), None))
    yield edge("packed, softcap", "packed", *capped, shape=along, softcap=2.0, **bounds)
    yield edge("packed, sinks", "packed", "sinks", shape=along, s_aux=sinks(), **bounds)
    few, many = {"sliding_window": 3, **bounds}, {"sliding_window": 50, **bounds}
    yield edge("packed, a long window", "packed", *window, shape=along, **many)
    yield edge("packed, a window on both sides", "packed", *window, shape=along, is_causal=False, **few)
    yield edge("packed, window and softcap", "packed", *window, *capped, shape=along, softcap=2.0, **few)
    yield edge("packed, window and sinks", "packed", *window, "sinks", shape=eight, s_aux=sinks(8), **few)
    yield edge("softcap alone", "softcap", softcap=1.0)
    yield edge("softcap and sinks", "softcap", "sinks", widths=(96, 64), softcap=2.0, s_aux=sinks())
    yield edge("sinks, not causal", "sinks", s_aux=sinks(), is_causal=False)
    last = leaf(draw.normal(1, 4, 5, 12))
    yield across("position bias of the last queries", "position_bias", position_bias=last)
