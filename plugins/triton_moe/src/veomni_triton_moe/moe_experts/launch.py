"""Launch configurations of the matrix products. Tables, never an autotuner: a search costs a user's first step minutes.

The tables for 16-bit values through TMA descriptors are the best on an H200, by
`benchmarks/moe_experts/tune_moe.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Launch:
    """A launch configuration of one product, whose programs compute tiles of ``[block_m, block_n]``.

    Attributes:
        block_m: Rows of a tile.
        block_n: Columns of a tile. In the gate-and-up product a tile holds this many of gate and as many of up.
        block_k: Elements of the reduced dimension per iteration.
        group_m: Tile rows per band in the order of tiles, see :func:`tiles.tile_position`.
        num_warps: Warps per program.
        num_stages: Depth of the software pipeline along the reduced dimension.
        programs: Programs per multiprocessor. Of several, one loads and multiplies while another stores its tile.
        halved_store: Whether a weight's gradient is stored in two halves, which takes half the shared memory.
    """

    block_m: int
    block_n: int
    block_k: int
    group_m: int
    num_warps: int
    num_stages: int
    programs: int = 1
    halved_store: bool = False


@dataclass(frozen=True)
class Launches:
    """One launch per product. The first four tile the rows, and share one list of tiles and so one ``block_m``."""

    gate_up: Launch  # [N, H] by [2I, H] per expert, gives [N, 2I] and [N, I]
    down: Launch  # [N, I] by [I, H] per expert, gives [N, H]
    dactivation: Launch  # [N, H] by [H, I] per expert, gives [N, I]
    dhidden: Launch  # [N, 2I] by [2I, H] per expert, gives [N, H]
    ddown: Launch  # reduced over the rows of an expert, gives [E, H, I]
    dgate_up: Launch  # reduced over the rows of an expert, gives [E, 2I, H]

    @property
    def block_m(self) -> int:
        """Rows of a tile in the products that tile the rows."""
        return self.down.block_m


@dataclass(frozen=True)
class NarrowLaunch:
    """A launch configuration of a product with one dimension of an adapter's rank, which memory bounds.

    Attributes:
        rows: Rows of a block.
        columns: Columns of a block.
        num_warps: Warps per program.
        num_stages: Depth of the software pipeline along the reduced dimension.
    """

    rows: int
    columns: int
    num_warps: int
    num_stages: int


# Launch(block_m, block_n, block_k, group_m, num_warps, num_stages). gate_up has half the block_n of down, because its
# accumulator is [block_m, 2 * block_n]: gate and up side by side.
_FULL_TILES = Launches(
    gate_up=Launch(128, 128, 64, 4, 8, 3),
    down=Launch(128, 256, 64, 8, 8, 3),
    dactivation=Launch(128, 256, 64, 16, 8, 3),
    dhidden=Launch(128, 256, 64, 4, 8, 3),
    ddown=Launch(128, 256, 32, 8, 8, 5),
    dgate_up=Launch(128, 256, 64, 4, 8, 3),
)
# A tile of a weight's gradient reduces only its expert's rows; where these are few, its store takes much of its time.
# At 128 rows, one program per multiprocessor with tiles of 128 x 256 used 28 % of the tensor cores and 44 % of the
# memory's speed. By this launch a step takes 0.94 of its time at 128 rows, 0.97 at 320, and 1.01 at 1024 (H200).
_SHORT_SUMS = Launch(128, 128, 32, 4, 4, 3, programs=3, halved_store=True)
_SHORT = 512  # rows per expert on average; nothing between 320 and 1024 was measured
_FULL_TILES_OF_SHORT_SUMS = replace(_FULL_TILES, ddown=_SHORT_SUMS, dgate_up=_SHORT_SUMS)
# From here on one expert's gate_up_proj alone takes half of an H200's L2 cache: bands of 16 tile rows instead of 4 read
# it from memory fewer times.
_LARGE_EXPERT = 2**24  # values in gate_up_proj[e]
_FULL_TILES_OF_LARGE_EXPERTS = replace(_FULL_TILES, gate_up=Launch(128, 128, 64, 16, 8, 3))
# Up to this many rows per expert on average, tiles of 128 rows waste too much of their work on rows that don't exist.
_FEW_ROWS = 192
# Only products that tile the rows get smaller tiles: the weights' gradients reduce over the rows.
_HALF_TILES = Launches(
    gate_up=Launch(64, 128, 64, 8, 8, 4),
    down=Launch(64, 256, 64, 16, 4, 4),
    dactivation=Launch(64, 256, 64, 16, 4, 4),
    dhidden=Launch(64, 256, 64, 16, 4, 4),
    ddown=_SHORT_SUMS,
    dgate_up=_SHORT_SUMS,
)


def _same(rows: Launch, gate_up: Launch) -> Launches:
    return Launches(gate_up, rows, rows, rows, rows, rows)


# Not tuned. Through pointers, for 16-bit values: other GPUs, and operands that TMA can't address. They take 64 KiB of
# shared memory.
_POINTERS = _same(Launch(128, 128, 64, 4, 8, 3), gate_up=Launch(128, 64, 64, 4, 8, 3))
_POINTERS_HALF_TILES = _same(Launch(64, 128, 64, 4, 4, 3), gate_up=Launch(64, 64, 64, 4, 4, 3))
# Not tuned. float32 products are exact, not TF32 (10-bit mantissas) on tensor cores: small tiles, which fit registers.
_FLOAT32 = _same(Launch(64, 64, 32, 4, 8, 2), gate_up=Launch(64, 32, 32, 4, 8, 2))


def launches(dtype: torch.dtype, rows_per_expert: int, gate_up_size: int, described: bool) -> Launches:
    """The launch of every product of a call.

    The choice depends on sizes that the host knows, never on how the routes fall: nothing is read from the device.

    Args:
        dtype: Dtype of the operands.
        rows_per_expert: ``T * K // E``, the average.
        gate_up_size: Values in one expert's gate and up projection, ``2I * H``.
        described: Whether operands go through TMA descriptors, rather than pointers.
    """
    if dtype == torch.float32:
        return _FLOAT32
    few_rows = rows_per_expert <= _FEW_ROWS
    if not described:
        return _POINTERS_HALF_TILES if few_rows else _POINTERS
    if few_rows:
        return _HALF_TILES
    if gate_up_size >= _LARGE_EXPERT:
        return _FULL_TILES_OF_LARGE_EXPERTS
    return _FULL_TILES_OF_SHORT_SUMS if rows_per_expert <= _SHORT else _FULL_TILES


def inner_launch(dtype: torch.dtype) -> NarrowLaunch:
    """The launch of ``adapters.inner_product``: its columns are reduced. Not tuned."""
    return NarrowLaunch(64, 32, 4, 2) if dtype == torch.float32 else NarrowLaunch(64, 64, 4, 4)


def factor_launch(dtype: torch.dtype) -> NarrowLaunch:
    """The launch of ``adapters.factor_gradient``: its rows are reduced. Not tuned."""
    return NarrowLaunch(32, 64, 4, 2) if dtype == torch.float32 else NarrowLaunch(64, 128, 4, 4)
