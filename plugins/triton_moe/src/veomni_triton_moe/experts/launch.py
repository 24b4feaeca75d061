"""Sizes of the products' tiles. Tables, never a search: a search costs a user's first step minutes."""

from __future__ import annotations

from dataclasses import dataclass

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
    """One launch per product. ``gate_up`` and ``rows`` share the tiles of rows, and with them ``block_m``."""

    gate_up: Launch
    rows: Launch
    weights: Launch


_DESCRIBED = Launches(
    gate_up=Launch(128, 128, 64, 4, 8, 3), rows=Launch(128, 256, 64, 4, 8, 3), weights=Launch(128, 256, 64, 4, 8, 3)
)
_POINTERS = Launches(
    gate_up=Launch(128, 64, 64, 4, 8, 3), rows=Launch(128, 128, 64, 4, 8, 3), weights=Launch(128, 128, 64, 4, 8, 3)
)
# float32 products are sums of exact products, not tensor-core approximations: small tiles, so that they fit registers.
_FLOAT32 = Launches(
    gate_up=Launch(64, 32, 32, 4, 8, 2), rows=Launch(64, 64, 32, 4, 8, 2), weights=Launch(64, 64, 32, 4, 8, 2)
)


def launches(dtype: torch.dtype, described: bool) -> Launches:
    """The launches for ``dtype``, by copy engine (``described``) or by pointers."""
    if dtype == torch.float32:
        return _FLOAT32
    return _DESCRIBED if described else _POINTERS
