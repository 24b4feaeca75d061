"""How the kernels for whole rows are launched: a function of the row's size alone, never of how many rows there are.

The order in which a row is summed follows from the tile and the number of warps. Were they chosen by the number of
rows, a row's result would depend on the batch it comes in.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton

# 16384 elements of bfloat16: x, dy, the weight and its gradient in float32 are then as large as the registers of a
# multiprocessor, 256 KiB.
WHOLE_ROW_BYTES = 32768


@dataclass(frozen=True)
class ForwardLaunch:
    """One program normalises ``rows`` rows with ``warps`` warps."""

    rows: int
    warps: int


@dataclass(frozen=True)
class BackwardLaunch:
    """``programs`` programs per multiprocessor walk over tiles of ``rows`` rows, ``stages`` - 1 of them read ahead."""

    rows: int
    warps: int
    programs: int
    stages: int


# By the bytes of one row, padded to a power of two. Those of 256, 4096, 8192 and 16384 bytes are the best that
# `benchmarks/triton_rms_norm.py --tune` found on an H200 in bfloat16; the others follow their neighbours.
FORWARD = {
    128: ForwardLaunch(32, 4),
    256: ForwardLaunch(16, 4),
    512: ForwardLaunch(8, 4),
    1024: ForwardLaunch(4, 4),
    2048: ForwardLaunch(2, 4),
    4096: ForwardLaunch(1, 4),
    8192: ForwardLaunch(1, 4),
    16384: ForwardLaunch(1, 16),
    32768: ForwardLaunch(1, 16),
}
# Backward holds x, dy, the weight and its gradient at once, and starts about as many programs as the registers of a
# multiprocessor hold.
BACKWARD = {
    128: BackwardLaunch(64, 4, 2, 3),
    256: BackwardLaunch(32, 4, 2, 3),
    512: BackwardLaunch(16, 4, 2, 3),
    1024: BackwardLaunch(8, 4, 2, 3),
    2048: BackwardLaunch(2, 4, 4, 3),
    4096: BackwardLaunch(1, 4, 4, 3),
    8192: BackwardLaunch(1, 4, 2, 3),
    16384: BackwardLaunch(1, 8, 1, 3),
    32768: BackwardLaunch(1, 16, 1, 2),
}


def fits_whole(width: int, element_size: int) -> bool:
    """Whether one program can hold a row of ``width`` elements of ``element_size`` bytes."""
    return _padded_bytes(width, element_size) <= WHOLE_ROW_BYTES


def forward_launch(width: int, element_size: int) -> ForwardLaunch:
    """How forward is launched for rows of ``width`` elements of ``element_size`` bytes that fit whole."""
    return FORWARD[max(_padded_bytes(width, element_size), min(FORWARD))]


def backward_launch(width: int, element_size: int) -> BackwardLaunch:
    """How backward is launched for rows of ``width`` elements of ``element_size`` bytes that fit whole."""
    return BACKWARD[max(_padded_bytes(width, element_size), min(BACKWARD))]


def _padded_bytes(width: int, element_size: int) -> int:
    return int(triton.next_power_of_2(width)) * element_size
