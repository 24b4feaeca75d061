"""Samples of attention's options, alone and combined, all with ``values_only``.

Kernels often have a code path per option and forget one option where two meet. Many samples repeat the shape of an
earlier one with other options, which finds kernels that cache something by shape alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from veomni_core.ops.contract import Draw, Sample, leaf

Heads = Callable[[Draw, int, int, int, int, int], tuple[Tensor, ...]]


def combined_options(
    device: torch.device,
    dtype: torch.dtype,
    heads: Heads,
    packed: Callable[[Tensor], dict[str, Any]],
    module: Callable[..., Any],
) -> Iterator[Sample]:
    """The samples. ``heads``, ``packed`` and ``module`` make the parts of a call, as for the other samples."""
    draw = Draw(device, dtype, seed=4)

    def edge(
        name: str, *needs: str, mask: Tensor | None = None, shape: Any = (2, 4, 2, 17), causal: bool = True, **kw: Any
    ) -> Sample:
        batch, q_heads, k_heads, length = shape
        call = (module(q_heads // k_heads, causal), *heads(draw, batch, q_heads, k_heads, length, 32), mask)
        return Sample(name, call, kw, needs, values_only=True)

    def across(name: str, *needs: str, mask: Tensor | None = None, causal: bool = True, **kw: Any) -> Sample:
        query, *_ = heads(draw, 2, 4, 2, 5, 32)
        _, key, value = heads(draw, 2, 4, 2, 12, 32)
        return Sample(name, (module(2, causal), query, key, value, mask), kw, needs, values_only=True)

    def padded(*lengths: int) -> Tensor:
        return torch.arange(12, device=device) < torch.tensor(lengths, device=device)[:, None]

    def sinks() -> Tensor:
        return leaf(draw.normal(4))

    yield edge("not causal at a shape seen before", is_causal=False)
    yield edge("causal, as the call says", causal=False, is_causal=True)
    yield edge("one key head, given scaling", shape=(2, 4, 1, 17), scaling=0.3)
    yield edge("groups of three", shape=(1, 6, 2, 9))

    def one_key(name: str, *needs: str, length: int, **kw: Any) -> Sample:
        """A single key's weight is 1, so query and key get no gradient but rounding noise; they are detached."""
        query, key, value = heads(draw, 2, 4, 2, length, 32)
        return Sample(name, (module(2), query.detach(), key.detach(), value, None), kw, needs, values_only=True)

    yield one_key("one token", length=1)
    yield across("the last queries")
    yield across("across, not causal", causal=False)

    some = draw.normal(2, 4, 12, 12).float() > 0
    some |= torch.eye(12, dtype=torch.bool, device=device)  # a row without any key would give NaN
    dense, square = ("dense_mask",), (2, 4, 2, 12)
    yield edge("a mask for each head, given scaling", *dense, mask=some, shape=square, scaling=0.3)
    yield edge("another mask at a shape seen before", *dense, mask=some[:, :1], shape=square)
    yield across("a mask of fewer queries", *dense, mask=some[:, :1, -5:])
    yield edge("mask and softcap", *dense, "softcap", mask=some[:, :1], shape=square, softcap=2.0)
    yield edge("mask and sinks", *dense, "sinks", mask=some[:, :1], shape=square, s_aux=sinks())

    padding, capped = ("padding_mask",), ("softcap", "softcap_by_lengths")
    yield edge("other padding at a shape seen before", *padding, mask=padded(4, 12), shape=square, scaling=0.3)
    yield edge("padding, not causal", *padding, mask=padded(12, 4), shape=square, is_causal=False)
    on_the_left = padded(4, 12).flip(1)
    yield edge("padding on the left", *padding, mask=on_the_left, shape=square)
    beside = (*padding, "sliding_window")
    yield edge("padding and window", *beside, mask=padded(11, 8), shape=square, sliding_window=3)
    yield edge("padding and softcap", *padding, *capped, mask=padded(11, 8), shape=square, softcap=2.0)
    yield edge("padding and sinks", *padding, "sinks", mask=padded(11, 8), shape=square, s_aux=sinks())

    window = ("sliding_window",)
    yield edge("a window at a shape seen before, given scaling", *window, sliding_window=4, scaling=0.3)
    yield one_key("a window of one key", *window, length=17, sliding_window=1)
    yield edge("a window on both sides", *window, sliding_window=3, is_causal=False)
    yield across("a window of the last queries", *window, sliding_window=4)
    yield edge("window and softcap", *window, "softcap", sliding_window=5, softcap=2.0)
    yield edge("window and sinks", *window, "sinks", sliding_window=5, s_aux=sinks())

    bounds = packed(torch.tensor([4, 1, 9, 7], device=device))
    along = (1, 4, 2, 21)
    yield edge("packed, given scaling", "packed", shape=along, scaling=0.3, **bounds)
    yield edge("packed, not causal", "packed", shape=along, is_causal=False, **bounds)
    yield edge("packed, one sequence", "packed", shape=along, **packed(torch.tensor([21], device=device)))
    yield edge("packed, softcap", "packed", *capped, shape=along, softcap=2.0, **bounds)
    yield edge("packed, sinks", "packed", "sinks", shape=along, s_aux=sinks(), **bounds)
    yield edge("softcap alone", "softcap", softcap=1.0)
    yield edge("sinks, not causal", "sinks", s_aux=sinks(), is_causal=False)
