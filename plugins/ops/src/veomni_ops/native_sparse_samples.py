"""Samples of attention's variant ``native_sparse``, its tolerances, and its contract."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from veomni_ops.contract import Contract, Draw, Sample, leaf, tolerances
from veomni_ops.native_sparse import (
    Places,
    Sizes,
    attended_compressed,
    block_scores,
    blocks_of,
    bounds_of,
    native_sparse,
)


class _Problems:
    """Draws the arguments of calls, in which no choice depends on rounding, unless ``tied``."""

    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int = 0) -> None:
        self.device, self._draw = device, Draw(device, dtype, seed)

    def call(
        self,
        batch: int,
        tokens: int,
        heads: tuple[int, int] = (4, 2),
        widths: tuple[int, int] = (16, 16),
        sizes: Sizes | None = None,
        lengths: Sequence[int] = (),
        tied: bool = False,
        own_window: bool = False,
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments and options; each row is a sequence of ``tokens``, unless it is packed of ``lengths``."""
        sizes = sizes or SMALL
        count = sum(map(sizes.compressed, lengths)) if lengths else sizes.compressed(tokens)
        bounds = torch.tensor([0, *lengths]).cumsum(0).int().to(self.device) if lengths else None
        (query_heads, groups), (width, value_width) = heads, widths

        def normal(*shape: int) -> Tensor:
            return self._draw.normal(batch, *shape)

        query, key, value = (
            normal(tokens, *shape) for shape in ((query_heads, width), (groups, width), (groups, value_width))
        )
        compressed_key, compressed_value = normal(count, groups, width), normal(count, groups, value_width)
        gates = normal(tokens, query_heads, 3).sigmoid()
        if tied:  # all of a query's weights are equal, in every dtype
            compressed_key = torch.zeros_like(compressed_key)
        else:
            query = self._cleared(query, compressed_key, compressed_value, bounds, sizes)
        options: dict[str, Any] = {each.name: getattr(sizes, each.name) for each in fields(sizes)}
        if own_window:
            window = normal(tokens, groups, width), normal(tokens, groups, value_width)
            options |= dict(zip(("window_key", "window_value"), map(leaf, window), strict=True))
        if bounds is not None:
            options["cu_seq_lens"] = bounds
        drawn = query, key, value, compressed_key, compressed_value, gates
        return tuple(map(leaf, drawn)), options

    def _cleared(self, query: Tensor, key: Tensor, value: Tensor, bounds: Tensor | None, sizes: Sizes) -> Tensor:
        """``query`` with other values where the last chosen block's score is close to that of the next."""
        batch, tokens = query.shape[:2]
        places = Places.of(batch * tokens, bounds_of(query, bounds), sizes)
        count, blocks = sizes.block_count, blocks_of(tokens, sizes)
        for _ in range(_DRAWS if count < blocks else 0):
            _, weights = attended_compressed(query.double(), key.double(), value.double(), places, None)
            scores = block_scores(weights.sum(2), places, blocks, sizes).sort(-1, descending=True)[0]
            last, following = scores[..., count - 1], scores[..., count]
            close = (last - following < _APART * last) & (following > -torch.inf)
            if not bool(close.any()):
                break
            rows = close.any(-1).view(batch, tokens, 1, 1)
            query = torch.where(rows, self._draw.normal(*query.shape), query)
        return query


_DRAWS, _APART = 20, 1e-3
SMALL = Sizes(compress_length=4, compress_stride=2, block_size=8, block_count=4, window=6)
_POOLED = Sizes(compress_length=8, compress_stride=8, block_size=8, block_count=3, window=9)  # fla's


def _samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    problems = _Problems(device, dtype)
    yield Sample("odd sizes", *problems.call(2, 53, (6, 2), (13, 7)))
    yield Sample("packed", *problems.call(1, 61, lengths=(3, 1, 40, 17)))
    yield Sample("packed in sequences shorter than a block", *problems.call(1, 21, lengths=(2, 5, 8, 6)))
    yield Sample("keys of the window's own", *problems.call(1, 45, own_window=True))
    yield Sample("ties", *problems.call(1, 61, tied=True))
    (query, key, value, *compressed, gates), options = problems.call(1, 42)
    by_head = leaf(query.detach().transpose(1, 2).contiguous().transpose(1, 2))
    wide = leaf(key.detach().repeat_interleave(2, dim=-1)[..., ::2])
    yield Sample("heads before tokens in memory", (by_head, wide, value, *compressed, gates), options)
    gates = leaf(gates.detach().float().transpose(2, 3).contiguous().transpose(2, 3))
    yield Sample("gates in float32", (query, key, value, *compressed, gates), {**options, "scaling": 0.3})
    yield from _edges(_Problems(device, dtype, seed=3))


def _edges(problems: _Problems) -> Iterator[Sample]:
    def edge(name: str, call: tuple[Any, dict[str, Any]]) -> Sample:
        return Sample(name, *call, values_only=True)

    # Of queries with one key, the gradients of query and key are 0, which no kernel meets but by chance.
    for name, lengths in (("one token", ()), ("packed, of one token each", (1,) * 5)):
        (query, key, *rest), options = problems.call(1, max(1, len(lengths)), lengths=lengths)
        yield edge(name, ((query.detach(), key.detach(), *rest), options))
    yield edge("no batch", problems.call(0, 9))
    yield edge("no compressed key", problems.call(2, 3))
    yield edge("fewer blocks than are chosen", problems.call(1, 19))
    yield edge("as many blocks as are chosen", problems.call(1, 32))
    yield edge("sixteen heads of a key head", problems.call(1, 41, (16, 1)))
    yield edge("seventeen heads of a key head", problems.call(1, 35, (17, 1), (8, 24)))
    yield edge("a head each, of one column", problems.call(1, 35, (3, 3), (1, 1)))
    yield edge("blocks that are compressed keys", problems.call(2, 43, sizes=_POOLED))
    yield edge("packed, ties", problems.call(1, 70, lengths=(5, 33, 32), tied=True))
    yield edge("an empty sequence", problems.call(1, 33, lengths=(0, 20, 0, 13, 0)))
    yield edge("one chosen block", problems.call(1, 40, sizes=Sizes(2, 1, 4, 1, 0, 1, 1)))
    yield edge("no block that is always chosen", problems.call(1, 40, sizes=Sizes(4, 4, 12, 2, 0, 0, 3)))
    yield edge("a window of all", problems.call(1, 37, sizes=Sizes(6, 3, 9, 3, 1, 1, 50)))
    (*inputs, gates), options = problems.call(1, 30)
    yield edge("frozen gates, of which some are zero", ((*inputs, (gates.detach() - 0.5).relu()), options))
    for first in (9, 13):  # as many boundaries of as many tokens, elsewhere
        call, options = problems.call(1, 21, lengths=(first, 21 - first), own_window=True)
        yield edge(f"a window's own keys, scaled, packed at {first}", (call, {**options, "scaling": 0.3}))
    yield edge("three first blocks", problems.call(1, 61, sizes=Sizes(4, 2, 8, 5, 3, 1, 6)))


def _beyond_a_tile(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    problems = _Problems(device, dtype)
    yield Sample("the paper's sizes", *problems.call(1, 1300, (16, 1), (48, 32), Sizes()))
    few = Sizes(block_count=4, window=70)
    yield Sample("few of many blocks, packed", *problems.call(1, 700, (6, 2), (40, 24), few, (33, 500, 1, 166)))
    yield Sample("75 blocks", *problems.call(1, 600, (2, 1)))
    for name, tokens, sizes in (
        ("200 blocks", 400, Sizes(2, 1, 2, 8, window=6)),
        ("two first blocks and four last ones", 100, Sizes(4, 2, 8, 7, 2, 4, 6)),
        ("compressed keys of four strides", 100, Sizes(8, 2, 8, 4, window=6)),
    ):
        yield Sample(name, *problems.call(1, tokens, (2, 1), (8, 8), sizes), values_only=True)


def _large(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    problems = _Problems(device, dtype)
    yield Sample("a model's widths", *problems.call(1, 2100, (32, 2), (192, 128), Sizes()))
    yield Sample("a model's widths, packed", *problems.call(1, 3000, (16, 1), (128, 128), Sizes(), (1800, 40, 1160)))


# In low precision kernels round probabilities, and their gradients, before they multiply them.
VALUES = tolerances(float32=(2e-5, 4e-6), bfloat16=(4e-2, 1e-2), float16=(5e-3, 1.3e-3))
GRADIENTS = tolerances(float32=(6e-5, 1e-5), bfloat16=(8e-2, 2e-2), float16=(1e-2, 2.5e-3))

CONTRACT = Contract(
    op_name="attention",
    variant="native_sparse",
    reference=native_sparse,
    samples=_samples,
    values=VALUES,
    gradients=GRADIENTS,
    beyond_a_tile=_beyond_a_tile,
    large=_large,
    large_factor=1e1,
)
