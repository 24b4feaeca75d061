"""Launch configurations of the kernels for whole rows: a function of the row's size, never of the number of rows.

The tile and the number of warps decide in which order a row is summed. If they were chosen by the number of rows, a
row's result would depend on the batch it comes in.
"""

from __future__ import annotations

from veomni_ops.sizes import power_of_two
from veomni_triton.row_launches import BackwardLaunch, ForwardLaunch

# 16384 elements of bfloat16: backward's x, dy, weight and weight gradient, each in float32, then fill the 256 KiB of
# registers of a multiprocessor.
WHOLE_ROW_BYTES = 32768


# Key: the bytes of one row, padded to a power of two. The entries of 256, 4096, 8192 and 16384 bytes are the best that
# `benchmarks/rms_norm/triton_rms_norm.py --tune` found on an H200 in bfloat16; the others follow their neighbours.
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
# A program holds x, dy, the weight and its gradient at once; a multiprocessor gets about as many programs as its
# registers hold.
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
    """The forward launch for rows of ``width`` elements of ``element_size`` bytes; they must fit whole."""
    # Rows narrower than the table's smallest entry share it.
    return FORWARD[max(_padded_bytes(width, element_size), min(FORWARD))]


def backward_launch(width: int, element_size: int) -> BackwardLaunch:
    """The backward launch for rows of ``width`` elements of ``element_size`` bytes; they must fit whole."""
    return BACKWARD[max(_padded_bytes(width, element_size), min(BACKWARD))]


def _padded_bytes(width: int, element_size: int) -> int:
    return power_of_two(width) * element_size
