"""How large the tiles of the kernels are, and with how many warps they run.

The keys of a token are one tile. A chunk has 64 tokens, whose products Hopper's matrix units take whole (wgmma), or 32
where heads are wider than 128, whose gradients would not fit into registers otherwise.

Chunks have 32 tokens for other widths too. There Triton 3.6 compiled 64 wrongly for an H200: with values of 8 columns,
``u`` was right for the first 16 tokens of a chunk and read other memory for the rest. Triton's interpreter was right,
and no fault was found in the PTX. Of 32 rows it makes products of older instructions (mma), right for every width.

Float32 has no matrix units at all. As three products of TF32 the kernels met an illegal memory access on an H200, and
lost digits of denormal values. Chunks of 32 tokens keep what is unrolled small.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from veomni_ops.sizes import power_of_two

WHOLE = 256  # columns: of values as wide as the kernels take
SHARED_TILE = 2048  # elements of the gradients of value heads that one program adds up
_WIDTHS_OF_64 = {64, 128}
_SMALLEST = 16  # what a product on matrix units takes


@dataclass(frozen=True)
class Launch:
    """Tiles and warps of one kernel.

    Attributes:
        columns: the columns of values in a tile, at most.
        warps: warps of a program.
        stages: depth of the software pipeline of its loop.
        registers: of a thread, at most; ``None`` for as many as the compiler likes.
    """

    columns: int
    warps: int
    stages: int
    registers: int | None = None


@dataclass(frozen=True)
class Launches:
    """Those of all kernels, for one dtype."""

    corrections: Launch
    states: Launch
    outputs: Launch
    correction_gradients: Launch
    state_gradients: Launch
    product_gradients: Launch
    query_gradients: Launch
    key_gradients: Launch


# The best that `triton_chunk_gated_delta_rule.py --tune` in `benchmarks/chunk_gated_delta_rule` found on an H200, for
# 2 x 4096 tokens of 32 value heads of 128 in bfloat16.
SIXTEEN_BITS = Launches(
    corrections=Launch(WHOLE, 4, 1, 168),
    states=Launch(32, 4, 2),
    outputs=Launch(128, 4, 2, 168),
    correction_gradients=Launch(WHOLE, 4, 1, 168),
    state_gradients=Launch(64, 8, 2),
    product_gradients=Launch(64, 4, 3),
    query_gradients=Launch(128, 4, 1),
    key_gradients=Launch(32, 4, 3),
)
SIXTEEN_BITS_BYTES = 99 << 10  # of shared memory; heads of 256 columns take 90 KB
# Not tuned: for AMD's GPUs before CDNA 4.
SIXTEEN_BITS_IN_64_KIB = replace(SIXTEEN_BITS, state_gradients=Launch(32, 4, 1))
# Products in float32 are unrolled into single ones, so tiles are small.
FLOAT32 = Launches(
    corrections=Launch(WHOLE, 4, 1),
    states=Launch(16, 4, 1),
    outputs=Launch(32, 4, 1),
    correction_gradients=Launch(WHOLE, 4, 1),
    state_gradients=Launch(16, 4, 1),
    product_gradients=Launch(16, 4, 1),
    query_gradients=Launch(16, 4, 1),
    key_gradients=Launch(16, 8, 1),
)


def launches(dtype: torch.dtype, shared_bytes: int) -> Launches:
    """The launches for queries, keys and values of ``dtype`` on a GPU whose programs have so much shared memory."""
    if dtype == torch.float32:
        return FLOAT32
    return SIXTEEN_BITS if shared_bytes >= SIXTEEN_BITS_BYTES else SIXTEEN_BITS_IN_64_KIB


def precision(dtype: torch.dtype) -> str:
    """How products of float32 operands are computed: as exactly as the dtype of the inputs can show."""
    return "ieee" if dtype == torch.float32 else "tf32"


def chunk_length(key_width: int, value_width: int, dtype: torch.dtype) -> int:
    """Tokens of a chunk."""
    return 64 if {key_width, value_width} <= _WIDTHS_OF_64 and dtype != torch.float32 else 32


def padded(width: int) -> int:
    """The width of a tile that holds ``width`` columns."""
    return max(_SMALLEST, power_of_two(width))


def columns(launch: Launch, value_width: int) -> int:
    """The columns of values in a tile."""
    return min(launch.columns, padded(value_width))
