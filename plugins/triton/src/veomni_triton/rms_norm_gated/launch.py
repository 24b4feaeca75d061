"""Launch configurations of the kernels for whole groups: a function of the group's size, never of the number of rows.

The tile and the number of warps decide in which order a group is summed. If they were chosen by the number of rows, a
row's result would depend on the batch it comes in.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from veomni_ops.sizes import power_of_two
from veomni_triton.row_launches import BackwardLaunch, ForwardLaunch

# Backward holds x, the gate, dy, the weight and its gradient in float32: 40960 of a multiprocessor's 65536 registers.
WHOLE_GROUP = 8192
_LOADED_AHEAD = 3  # tensors: dy, x and the gate
_SCRATCH_BYTES = 1024  # of shared memory, more than the sums of a program's warps take


# Key: the elements of a group, padded to a power of two. The entries of 128, 1024 and 8192 are the best that
# `benchmarks/rms_norm_gated/triton_rms_norm_gated.py --tune` found on an H200 in bfloat16; the others follow them.
FORWARD = {
    64: ForwardLaunch(32, 4),
    128: ForwardLaunch(16, 8),
    256: ForwardLaunch(8, 4),
    512: ForwardLaunch(4, 4),
    1024: ForwardLaunch(2, 4),
    2048: ForwardLaunch(1, 4),
    4096: ForwardLaunch(1, 8),
    8192: ForwardLaunch(1, 16),
}
BACKWARD = {
    64: BackwardLaunch(32, 4, 4, 3),
    128: BackwardLaunch(16, 4, 4, 3),
    256: BackwardLaunch(8, 4, 4, 3),
    512: BackwardLaunch(4, 4, 3, 3),
    1024: BackwardLaunch(2, 4, 3, 3),
    2048: BackwardLaunch(1, 4, 4, 3),
    4096: BackwardLaunch(1, 8, 2, 3),
    8192: BackwardLaunch(1, 8, 1, 3),
}


def forward_launch(width: int) -> ForwardLaunch:
    """The forward launch for groups of ``width`` elements, at most ``WHOLE_GROUP``."""
    return FORWARD[_padded(width)]


@cache
def backward_launch(width: int, element_size: int, shared_bytes: int) -> BackwardLaunch:
    """The backward launch for groups of ``width`` elements, at most ``WHOLE_GROUP``, of ``element_size`` bytes each.

    The pipeline is as deep as the GPU's shared memory allows. That changes no sum.
    """
    launch = BACKWARD[_padded(width)]
    tiles = _LOADED_AHEAD * launch.rows * _padded(width) * element_size
    return replace(launch, stages=min(launch.stages, 1 + (shared_bytes - _SCRATCH_BYTES) // tiles))


def _padded(width: int) -> int:
    # Smaller groups share the table's smallest entry.
    return max(power_of_two(width), min(FORWARD))
