"""How large the tiles of the kernels are, and with how many warps they run.

A chunk is nothing but a block of tokens: no result depends on its length, nor on the chunk size of a model's config.

Matrix units take heads and states of a multiple of 16 columns, and of more than 32. Others are computed in float32:
their products are small, and so few columns don't average out what rounded operands are off by, which the gradient of
A would show. Float32 has no matrix units, and its products are unrolled into single ones, so tiles are small.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce

import torch

from veomni_ops.sizes import power_of_two

_SMALLEST = 16  # what a product on matrix units takes
_NARROWEST = 48  # columns


@dataclass(frozen=True)
class Launch:
    """Tiles and warps of one kernel.

    Attributes:
        columns: the columns of a head in a tile, at most.
        states: the columns of a state in a tile, at most.
        warps: warps of a program.
        stages: depth of the software pipeline of its loop.
        heads: whose gradients one program adds up, at most.
        registers: of a thread, at most; ``None`` for as many as the compiler likes.
    """

    columns: int
    states: int
    warps: int
    stages: int
    heads: int = 1
    registers: int | None = None


@dataclass(frozen=True)
class Launches:
    """Those of all kernels, and the tokens of a chunk."""

    chunk: int
    scores: Launch
    states: Launch
    outputs: Launch
    state_gradients: Launch
    pair_gradients: Launch
    product_gradients: Launch
    shared_gradients: Launch


SIXTEEN_BITS = Launches(
    chunk=64,
    scores=Launch(64, 64, 4, 2),
    states=Launch(64, 128, 4, 3),
    outputs=Launch(64, 128, 4, 2),
    state_gradients=Launch(64, 128, 4, 3),
    pair_gradients=Launch(64, 128, 8, 2, heads=16),
    product_gradients=Launch(64, 128, 8, 2, heads=16),
    shared_gradients=Launch(64, 128, 4, 2),
)
SIXTEEN_BITS_BYTES = 160 << 10  # of shared memory that these launches take
# Not tuned: for GPUs with less shared memory.
SIXTEEN_BITS_IN_64_KIB = replace(
    SIXTEEN_BITS,
    states=Launch(64, 64, 4, 2),
    outputs=Launch(64, 64, 4, 1),
    state_gradients=Launch(64, 64, 4, 1),
    pair_gradients=Launch(64, 64, 4, 1, heads=16),
    product_gradients=Launch(64, 64, 4, 1, heads=16),
    shared_gradients=Launch(64, 64, 4, 1),
)
_SMALL = Launch(32, 32, 4, 1)
FLOAT32 = Launches(32, *(_SMALL,) * 4, *(replace(_SMALL, heads=16),) * 2, _SMALL)


def operand_dtype(width: int, state: int, *dtypes: torch.dtype) -> torch.dtype:
    """In which dtype heads and states so wide are multiplied that come in ``dtypes``."""
    if any(each % _SMALLEST or each < _NARROWEST for each in (width, state)):
        return torch.float32
    return reduce(torch.promote_types, dtypes)


def launches(dtype: torch.dtype, shared_bytes: int) -> Launches:
    """The launches for operands of ``dtype``, on a GPU whose programs have so much shared memory."""
    if dtype == torch.float32:
        return FLOAT32
    return SIXTEEN_BITS if shared_bytes >= SIXTEEN_BITS_BYTES else SIXTEEN_BITS_IN_64_KIB


def tile(most: int, width: int) -> int:
    """The columns of a tile, ``most`` or as few as hold ``width``."""
    return min(most, max(_SMALLEST, power_of_two(width)))


def slice_of_heads(heads: int, most: int) -> int:
    """Into how many neighbouring heads a group's ``heads`` are divided: ``most``, or the next divisor below it."""
    return next(size for size in range(min(heads, most), 0, -1) if not heads % size)
