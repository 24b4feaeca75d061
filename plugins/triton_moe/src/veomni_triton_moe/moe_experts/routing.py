"""Routes sorted by expert, on the device: a stable counting sort, and the list of tiles that the products work off.

A route is one entry of ``top_k_index[T, K]``, numbered ``t * K + k``. Its row is its place among all routes in the
order of their experts, equal experts in the order of the routes. Indices that are no expert's come last, in no group.
Everything is whole numbers, so results repeat bit for bit; nothing is read on the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

SMALLEST_BLOCK_M = 16  # rows of a tile, the fewest that a matrix product takes

_BLOCK = 256  # routes that one program sorts
_RANK_BLOCK = 32  # routes they are compared with at a time
_TILE_TABLE = 8192  # entries of the table tiles x experts that one program looks through


@dataclass(frozen=True)
class Routing:
    """Views of one ``int32`` buffer, which is what autograd keeps."""

    buffer: Tensor
    tokens: int
    k: int
    experts: int
    block_m: int

    @property
    def routes(self) -> int:
        """``N = T * K``, also the number of rows."""
        return self.tokens * self.k

    @property
    def route_of_row(self) -> Tensor:
        """``[N]``: the route that stands in each row."""
        return self.buffer[: self.routes]

    @property
    def row_of_route(self) -> Tensor:
        """``[N]``: the row in which each route stands."""
        return self.buffer[self.routes : 2 * self.routes]

    @property
    def offsets(self) -> Tensor:
        """``[E + 1]``: the first row of each expert, and after the last expert the number of rows that count."""
        return self.buffer[2 * self.routes : 2 * self.routes + self.experts + 1]

    @property
    def tiles(self) -> Tensor:
        """``[1 + 2 * max_tiles]``: how many tiles there are, then each one's expert, then each one's first row."""
        return self.buffer[2 * self.routes + self.experts + 1 :]

    @property
    def max_tiles(self) -> int:
        """The most tiles of ``block_m`` rows that these routes can fill, however they fall."""
        return self.routes // self.block_m + min(self.experts, self.routes)


def routing_size(routes: int, experts: int) -> int:
    """The length of a :class:`Routing`'s buffer, whatever its ``block_m``."""
    return 2 * routes + experts + 2 + 2 * (routes // SMALLEST_BLOCK_M + experts)


def route(top_k_index: Tensor, experts: int, block_m: int) -> Routing:
    """Sort the routes of ``top_k_index[T, K]`` and list the tiles of ``block_m`` rows of one expert each."""
    index = top_k_index.contiguous()
    size = routing_size(index.numel(), experts)
    buffer = torch.empty(size, dtype=torch.int32, device=index.device)
    tokens, k = index.shape
    routing = Routing(buffer, tokens, k, experts, block_m)
    routes, bins = routing.routes, triton.next_power_of_2(experts + 1)
    blocks = triton.cdiv(routes, _BLOCK)
    counts = torch.empty(bins, blocks, dtype=torch.int32, device=index.device)
    totals = torch.empty(bins, dtype=torch.int32, device=index.device)
    _count[(blocks,)](index, counts, routes, experts, blocks, BINS=bins, BLOCK=_BLOCK)
    _scan[(bins,)](counts, totals, blocks, BLOCKS=triton.next_power_of_2(max(blocks, 1)))
    listed = max(_TILE_TABLE // bins, 1)
    _list_tiles[(max(triton.cdiv(routing.max_tiles, listed), 1),)](
        totals, routing.offsets, routing.tiles, routing.max_tiles, experts, BINS=bins, TILES=listed, BLOCK_M=block_m
    )
    rows, places = routing.route_of_row, routing.row_of_route
    _place[(blocks,)](
        index, counts, routing.offsets, rows, places, routes, experts, blocks, BLOCK=_BLOCK, RANK_BLOCK=_RANK_BLOCK
    )
    return routing


@triton.jit
def _load_expert(index, route, routes, experts):
    """The experts of some routes; ``experts`` for the dropped ones and beyond the last route."""
    expert = tl.load(index + route, mask=route < routes, other=experts)
    return tl.where((expert >= 0) & (expert < experts), expert, experts).to(tl.int32)


@triton.jit(do_not_specialize=["routes", "experts", "blocks"])
def _count(index, counts, routes, experts, blocks, BINS: tl.constexpr, BLOCK: tl.constexpr):
    """``counts[bin, block]``: how many of a block's routes go to each expert."""
    block = tl.program_id(0)
    route = block * BLOCK + tl.arange(0, BLOCK)
    expert = _load_expert(index, route, routes, experts)
    tl.store(counts + tl.arange(0, BINS) * blocks + block, tl.histogram(expert, BINS))


@triton.jit(do_not_specialize=["blocks"])
def _scan(counts, totals, blocks, BLOCKS: tl.constexpr):
    """Each expert's ``counts`` become what comes before a block; their sums are ``totals``."""
    expert = tl.program_id(0)
    block = tl.arange(0, BLOCKS)
    count = tl.load(counts + expert * blocks + block, mask=block < blocks, other=0)
    until = tl.cumsum(count, axis=0)
    tl.store(counts + expert * blocks + block, until - count, mask=block < blocks)
    tl.store(totals + expert, tl.sum(count))


@triton.jit(do_not_specialize=["max_tiles", "experts"])
def _list_tiles(
    totals, offsets, tiles, max_tiles, experts, BINS: tl.constexpr, TILES: tl.constexpr, BLOCK_M: tl.constexpr
):
    """Each expert's first row, and the expert and first row of ``TILES`` tiles."""
    expert = tl.arange(0, BINS)
    total = tl.load(totals + expert, mask=expert < experts, other=0)
    first_row = tl.cumsum(total, axis=0) - total
    tl.store(offsets + expert, first_row, mask=expert <= experts)
    tile_count = tl.cdiv(total, BLOCK_M)
    tile_end = tl.cumsum(tile_count, axis=0)
    first_tile = tile_end - tile_count
    tl.store(tiles, tl.sum(tile_count))
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    owns = (tile[:, None] >= first_tile[None, :]) & (tile[:, None] < tile_end[None, :])
    row = first_row[None, :] + (tile[:, None] - first_tile[None, :]) * BLOCK_M
    tl.store(tiles + 1 + tile, tl.sum(tl.where(owns, expert[None, :], 0), axis=1), mask=tile < max_tiles)
    tl.store(tiles + 1 + max_tiles + tile, tl.sum(tl.where(owns, row, 0), axis=1), mask=tile < max_tiles)


@triton.jit(do_not_specialize=["routes", "experts", "blocks"])
def _place(
    index,
    counts,
    offsets,
    route_of_row,
    row_of_route,
    routes,
    experts,
    blocks,
    BLOCK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
):
    """The row of each route: after the earlier experts, the earlier blocks, and the earlier routes of its block."""
    block = tl.program_id(0)
    place = tl.arange(0, BLOCK)
    route = block * BLOCK + place
    expert = _load_expert(index, route, routes, experts)
    rank = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, BLOCK, RANK_BLOCK):
        other_place = start + tl.arange(0, RANK_BLOCK)
        other = _load_expert(index, block * BLOCK + other_place, routes, experts)
        earlier = (other[None, :] == expert[:, None]) & (other_place[None, :] < place[:, None])
        rank += tl.sum(earlier.to(tl.int32), axis=1)
    row = tl.load(offsets + expert) + tl.load(counts + expert * blocks + block) + rank
    tl.store(row_of_route + route, row, mask=route < routes)
    tl.store(route_of_row + row, route, mask=route < routes)
