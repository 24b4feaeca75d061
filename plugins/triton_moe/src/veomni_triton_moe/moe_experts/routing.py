"""Routes sorted by expert, on the device: a stable counting sort, and the list of tiles that the products process.

A route is one entry of ``top_k_index[T, K]``, numbered ``t * K + k``. Its row is its position once all routes are
sorted by expert; routes of one expert keep their order. The rows of an expert are adjacent and called its group. Routes
whose index is not in ``[0, E)`` are dropped: their rows come last, in no group. All arithmetic is on integers and
without atomics, so the order is the same on every run; nothing is read on the host.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from veomni_ops.sizes import ceil_div, power_of_two
from veomni_ops.triton_launches import triton_kernel

SMALLEST_BLOCK_M = 16  # rows of a tile; tl.dot takes no fewer

_BLOCK = 256  # routes per program in the kernels over routes
_SCAN_BLOCKS = 4096  # most counts that _scan holds in registers at a time
_RANK_BLOCK = 32  # routes that these are compared with at a time: a [_BLOCK, _RANK_BLOCK] table in registers
_TILE_TABLE = 8192  # elements of the [TILES, BINS] table that one program of _list_tiles holds in registers


class Routing:
    """The sorted routes: views of one ``int32`` buffer, which is what autograd saves.

    Args:
        buffer: ``[routing_size(N, E)]``, the four views below one after the other.
        tokens: ``T``.
        k: Choices per token, ``K``.
        experts: ``E``.
        block_m: Rows of the tiles that are listed.

    Attributes:
        routes: ``N = T * K``, also the number of rows.
        route_of_row: ``[N]``: the route of each row; divided by ``K``, its token.
        row_of_route: ``[N]``: the row of each route, the inverse permutation.
        offsets: ``[E + 1]``: the first row of each expert's group, then the number of rows in groups (not dropped).
        tiles: ``[1 + 2 * max_tiles]``: the number of tiles, then the expert of each, then the first row of each.
        max_tiles: The most tiles of ``block_m`` rows that these routes can need, however they fall on experts.
    """

    def __init__(self, buffer: Tensor, tokens: int, k: int, experts: int, block_m: int) -> None:
        self.buffer, self.tokens, self.k, self.experts, self.block_m = buffer, tokens, k, experts, block_m
        self.routes = routes = tokens * k
        # At once: four slices take twice as long.
        sizes = (routes, routes, experts + 1, len(buffer) - 2 * routes - experts - 1)
        self.route_of_row, self.row_of_route, self.offsets, self.tiles = buffer.split(sizes)
        # The number itself is on the device only. Each group that isn't empty has at most one tile that isn't full.
        self.max_tiles = routes // block_m + min(experts, routes)


def routing_size(routes: int, experts: int) -> int:
    """The length of a :class:`Routing`'s buffer, large enough for any ``block_m``: a fake kernel doesn't know it."""
    return 2 * routes + experts + 2 + 2 * (routes // SMALLEST_BLOCK_M + experts)


def route(top_k_index: Tensor, experts: int, block_m: int) -> Routing:
    """Sort the routes of ``top_k_index`` and list the tiles: at most ``block_m`` rows, all of one expert.

    Args:
        top_k_index: ``[T, K]``, integers; those outside ``[0, experts)`` are dropped.
        experts: ``E``.
        block_m: Rows of a tile.
    """
    index = top_k_index.contiguous()
    size = routing_size(index.numel(), experts)
    buffer = torch.empty(size, dtype=torch.int32, device=index.device)
    tokens, k = index.shape
    routing = Routing(buffer, tokens, k, experts, block_m)
    # One bin more than experts, for the dropped routes; a power of two, as tl.arange and tl.histogram want it.
    routes, bins = routing.routes, power_of_two(experts + 1)
    blocks = ceil_div(routes, _BLOCK)
    # Bins first: _scan then reads a bin's counts as one contiguous line.
    counts = torch.empty(bins, blocks, dtype=torch.int32, device=index.device)
    totals = torch.empty(bins, dtype=torch.int32, device=index.device)
    _count[(blocks,)](index, counts, routes, experts, blocks, BINS=bins, BLOCK=_BLOCK)
    _scan[(bins,)](counts, totals, blocks, BLOCKS=min(power_of_two(max(blocks, 1)), _SCAN_BLOCKS))
    listed = max(_TILE_TABLE // bins, 1)
    # At least one program, which writes the offsets and the number of tiles even without routes.
    _list_tiles[(max(ceil_div(routing.max_tiles, listed), 1),)](
        totals, routing.offsets, routing.tiles, routing.max_tiles, experts, BINS=bins, TILES=listed, BLOCK_M=block_m
    )
    rows, places = routing.route_of_row, routing.row_of_route
    _place[(blocks,)](
        index, counts, routing.offsets, rows, places, routes, experts, blocks, BLOCK=_BLOCK, RANK_BLOCK=_RANK_BLOCK
    )
    return routing


# T tokens, K choices per token, N = T * K routes and as many rows, E experts. BLOCK routes per program, BINS is E + 1
# rounded up to a power of two. Sizes are not specialised: Triton would compile a kernel anew where one happens to be 1
# or divisible by 16, and N and the number of blocks differ by batch.


@triton.jit
def _load_expert(index, route, routes, experts):
    """The experts of ``route``; ``experts``, the bin of the dropped, where invalid or beyond the last route."""
    expert = tl.load(index + route, mask=route < routes, other=experts)
    # Narrowed after the range check: an int64 index such as 2**32 is to be dropped, not to wrap to expert 0.
    return tl.where((expert >= 0) & (expert < experts), expert, experts).to(tl.int32)


@triton_kernel(do_not_specialize=["routes", "experts", "blocks"])
def _count(
    index,  # [N], top_k_index flattened
    counts,  # [BINS, blocks], written
    routes,  # N
    experts,  # E
    blocks,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``counts[bin, block]``: how many of a block's routes go to each expert. One program per block."""
    block = tl.program_id(0)
    route = block * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    # The last block's places beyond N count as dropped. No later block's prefix contains them.
    expert = _load_expert(index, route, routes, experts)  # [BLOCK]
    # All bins are written, the unused ones with zeros: counts is not initialised. int64, since BINS * blocks can exceed
    # 2**31.
    tl.store(counts + tl.arange(0, BINS).to(tl.int64) * blocks + block, tl.histogram(expert, BINS))


@triton_kernel(do_not_specialize=["blocks"])
def _scan(
    counts,  # [BINS, blocks], read and overwritten
    totals,  # [BINS], written
    blocks,
    BLOCKS: tl.constexpr,  # a power of two; all of them where there are few
):
    """An exclusive prefix sum over blocks, in place: how many routes of a bin earlier blocks have. One program per bin.

    ``totals`` gets the sums. The line is read ``BLOCKS`` at a time, since Triton takes minutes to compile for a million
    elements (2^28 routes), and takes no more.
    """
    expert = tl.program_id(0)
    line = counts + expert.to(tl.int64) * blocks
    before = 0  # the routes of all blocks before these
    for start in range(0, blocks, BLOCKS):
        block = start + tl.arange(0, BLOCKS)  # [BLOCKS]
        count = tl.load(line + block, mask=block < blocks, other=0)  # [BLOCKS]
        until = before + tl.cumsum(count, axis=0)  # inclusive; less its own count it is what comes before
        tl.store(line + block, until - count, mask=block < blocks)
        before += tl.sum(count)
    tl.store(totals + expert, before)


@triton_kernel(do_not_specialize=["max_tiles", "experts"])
def _list_tiles(
    totals,  # [BINS]
    offsets,  # [E + 1], written
    tiles,  # [1 + 2 * max_tiles], written
    max_tiles,
    experts,  # E
    BINS: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Each expert's first row, and the expert and first row of ``TILES`` tiles per program."""
    expert = tl.arange(0, BINS)  # [BINS]
    # The bin of the dropped is left out here, so that offsets[E] is where the dropped rows begin, and no tile has them.
    total = tl.load(totals + expert, mask=expert < experts, other=0)  # [BINS]
    first_row = tl.cumsum(total, axis=0) - total  # [BINS]
    # Every program writes the same offsets and number of tiles: that saves a launch of their own.
    tl.store(offsets + expert, first_row, mask=expert <= experts)
    # Tiles don't cross groups: a group's last tile is partly empty rather than shared with the next expert.
    tile_count = tl.cdiv(total, BLOCK_M)  # [BINS]
    tile_end = tl.cumsum(tile_count, axis=0)  # [BINS]
    first_tile = tile_end - tile_count  # [BINS]
    tl.store(tiles, tl.sum(tile_count))
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)  # [TILES]
    # Each tile has exactly one owner (none beyond the last tile), so a masked sum over experts selects a value.
    owns = (tile[:, None] >= first_tile[None, :]) & (tile[:, None] < tile_end[None, :])  # [TILES, BINS]
    row = first_row[None, :] + (tile[:, None] - first_tile[None, :]) * BLOCK_M  # [TILES, BINS]
    tl.store(tiles + 1 + tile, tl.sum(tl.where(owns, expert[None, :], 0), axis=1), mask=tile < max_tiles)
    tl.store(tiles + 1 + max_tiles + tile, tl.sum(tl.where(owns, row, 0), axis=1), mask=tile < max_tiles)


@triton_kernel(do_not_specialize=["routes", "experts", "blocks"])
def _place(
    index,  # [N], top_k_index flattened
    counts,  # [BINS, blocks], prefix sums by now
    offsets,  # [E + 1]
    route_of_row,  # [N], written
    row_of_route,  # [N], written
    routes,  # N
    experts,  # E
    blocks,
    BLOCK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
):
    """The row of each route: after the earlier experts, the earlier blocks, and the earlier routes of its block."""
    block = tl.program_id(0)
    place = tl.arange(0, BLOCK)  # [BLOCK]
    route = block * BLOCK + place  # [BLOCK]
    expert = _load_expert(index, route, routes, experts)  # [BLOCK]
    # Ranks by comparing all pairs: atomics would hand out ranks in the order in which threads happen to arrive, and
    # the order of an expert's rows decides the order in which its weights' gradients are summed.
    rank = tl.zeros((BLOCK,), tl.int32)  # [BLOCK], earlier routes of the block with the same expert
    for start in range(0, BLOCK, RANK_BLOCK):
        other_place = start + tl.arange(0, RANK_BLOCK)  # [RANK_BLOCK]
        # Loaded again, since a tensor in registers can't be sliced.
        other = _load_expert(index, block * BLOCK + other_place, routes, experts)  # [RANK_BLOCK]
        earlier = (other[None, :] == expert[:, None]) & (other_place[None, :] < place[:, None])  # [BLOCK, RANK_BLOCK]
        rank += tl.sum(earlier.to(tl.int32), axis=1)
    # Dropped routes have expert E, so offsets[E] puts them behind all groups, in order too.
    row = tl.load(offsets + expert) + tl.load(counts + expert.to(tl.int64) * blocks + block) + rank
    tl.store(row_of_route + route, row, mask=route < routes)
    tl.store(route_of_row + row, route, mask=route < routes)
