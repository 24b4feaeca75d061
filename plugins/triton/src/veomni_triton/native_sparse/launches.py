"""What the kernels of native sparse attention are launched with, and what all launches of a call share."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from veomni_ops.native_sparse import Places, Sizes, bounds_of
from veomni_ops.sizes import power_of_two
from veomni_triton.attention_launches import SMALL, Launch, constants_of, takes_small

# The fastest of those that an H100 was given with 16384 tokens, 64 heads of 4 key heads, and widths of 192 and 128, by
# `benchmarks/native_sparse/triton_native_sparse.py --tune`; SUMS was not tuned. A chosen block is a tile of keys.
FORWARD, DQUERY, DKEYS = Launch(64, 32, 4, 3), Launch(64, 32, 4, 3), Launch(32, 64, 4, 2)
SUMS = Launch(64, 128, 8, 2)
CHOSEN, CHOSEN_DQUERY, CHOSEN_DKEYS = Launch(16, 64, 4, 2), Launch(16, 64, 4, 2), Launch(32, 64, 4, 2)


class Call:
    """What all launches of a call share: contiguous tensors, flat over the batch, and where its tokens are."""

    def __init__(
        self, tensors: tuple[Tensor | None, ...], cu_seq_lens: Tensor | None, scaling: float, sizes: Sizes
    ) -> None:
        # Without keys or values of its own, a window has those of the chosen blocks.
        own = (tensors[place - 4 if x is None else place] for place, x in enumerate(tensors))
        flat: Any = [x.contiguous() for x in own if x is not None]
        self.query, self.key, self.value, *others, self.gates = flat
        self.compressed, self.window = (others[0], others[1]), (others[2], others[3])
        self.row: int = self.query.shape[1]
        self.heads: int = self.query.shape[2]
        self.width: int = self.query.shape[3]
        self.tokens, self.groups, self.value_width = len(self.query) * self.row, self.key.shape[2], self.value.shape[3]
        self.sizes, self.scaling, self.by_two = sizes, scaling, scaling / math.log(2)
        self.bounds = bounds_of(self.query, cu_seq_lens)
        self.places = places = Places.of(self.tokens, self.bounds, sizes)
        self.begins, self.blocks = places.begin.int(), places.block.int()
        last = self.compressed[0].shape[:2].numel()
        self.complete = places.compressed_begin.clamp_max(last).int(), places.compressed_stop.clamp_max(last).int()
        stops = torch.arange(1, self.tokens + 1, dtype=torch.int32, device=self.query.device)
        self.last_keys = torch.maximum(self.begins, stops - sizes.window), stops
        self.is_small = takes_small(self.query)

    def counts(self) -> tuple[int, int]:
        return self.heads, self.groups

    def fitting(self, launch: Launch) -> Launch:
        """That launch, or the small one where the other does not fit."""
        return SMALL if self.is_small else launch

    def of_ranges(self, launch: Launch) -> dict[str, Any]:
        launch = self.fitting(launch)
        return {"M": launch.queries, "N": launch.keys, **constants_of(self.query, self.value_width, launch)}

    def of_blocks(self, launch: Launch) -> dict[str, Any]:
        """Of tiles of heads of one query and the keys of one block."""
        launch = self.fitting(launch)
        return {
            "H": max(16, power_of_two(self.heads // self.groups)),
            "N": max(16, power_of_two(self.sizes.block_size)),
            **constants_of(self.query, self.value_width, launch),
        }
