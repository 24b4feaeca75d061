"""Sizes of the products' tiles. Tables, never a search: a search costs a user's first step minutes.

The sizes for 16-bit values and the copy engine are the best that `benchmarks/tune_moe.py` found on an H200.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Launch:
    """The tile ``block_m x block_n``, reduced ``block_k`` at a time; ``group_m`` tiles of rows are worked off together.

    For gate and up together, ``block_n`` counts the columns of one of them.
    """

    block_m: int
    block_n: int
    block_k: int
    group_m: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Launches:
    """One launch per product. Those over rows share one list of tiles, and with it ``block_m``."""

    gate_up: Launch
    down: Launch
    dactivation: Launch
    dhidden: Launch
    ddown: Launch
    dgate_up: Launch

    @property
    def block_m(self) -> int:
        """Rows of a tile in the products over rows."""
        return self.down.block_m


_FULL_TILES = Launches(
    gate_up=Launch(128, 128, 64, 4, 8, 3),
    down=Launch(128, 256, 64, 8, 8, 3),
    dactivation=Launch(128, 256, 64, 16, 8, 3),
    dhidden=Launch(128, 256, 64, 4, 8, 3),
    ddown=Launch(128, 256, 32, 8, 8, 5),
    dgate_up=Launch(128, 256, 64, 4, 8, 3),
)
# Where one expert's gate and up alone are half of the L2 cache, 16 tiles of rows share what is read of them.
_LARGE_EXPERT = 2**24  # values
_FULL_TILES_OF_LARGE_EXPERTS = replace(_FULL_TILES, gate_up=Launch(128, 128, 64, 16, 8, 3))
# With fewer rows per expert than this, tiles of 128 rows are mostly empty.
_FEW_ROWS = 192
_HALF_TILES = Launches(
    gate_up=Launch(64, 128, 64, 8, 8, 4),
    down=Launch(64, 256, 64, 16, 4, 4),
    dactivation=Launch(64, 256, 64, 16, 4, 4),
    dhidden=Launch(64, 256, 64, 16, 4, 4),
    ddown=Launch(128, 256, 32, 8, 8, 5),
    dgate_up=Launch(128, 256, 32, 4, 8, 5),
)


def _same(rows: Launch, gate_up: Launch) -> Launches:
    return Launches(gate_up, rows, rows, rows, rows, rows)


_POINTERS = _same(Launch(128, 128, 64, 4, 8, 3), gate_up=Launch(128, 64, 64, 4, 8, 3))
_POINTERS_HALF_TILES = _same(Launch(64, 128, 64, 4, 4, 3), gate_up=Launch(64, 64, 64, 4, 4, 3))
# float32 products are exact ones, not the tensor cores' 10-bit approximation: small tiles, so that they fit registers.
_FLOAT32 = _same(Launch(64, 64, 32, 4, 8, 2), gate_up=Launch(64, 32, 32, 4, 8, 2))


def launches(dtype: torch.dtype, rows_per_expert: int, gate_up_size: int, described: bool) -> Launches:
    """The launches for ``dtype``, so many rows per expert, and so many values in one expert's gate and up.

    ``described`` says that operands go by the copy engine, not by pointers.
    """
    if dtype == torch.float32:
        return _FLOAT32
    few_rows = rows_per_expert <= _FEW_ROWS
    if not described:
        return _POINTERS_HALF_TILES if few_rows else _POINTERS
    if few_rows:
        return _HALF_TILES
    return _FULL_TILES_OF_LARGE_EXPERTS if gate_up_size >= _LARGE_EXPERT else _FULL_TILES
