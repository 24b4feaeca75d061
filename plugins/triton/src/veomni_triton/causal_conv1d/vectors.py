"""Takes vectors of neighbouring elements apart, and puts them together again, within each thread."""

from __future__ import annotations

import triton
import triton.language as tl

# A thread that loads a lane's vector has all of it: halving it again and again moves nothing to another thread.


@triton.jit
def apart(vectors, LANES: tl.constexpr, COUNT: tl.constexpr):
    """The columns of ``vectors [LANES, COUNT]``, a power of two of them, as a tuple of blocks ``[LANES]``."""
    if COUNT == 1:
        return (tl.reshape(vectors, (LANES,)),)
    else:
        # Halves [LANES, COUNT / 2], which split takes from the last dimension.
        low, high = tl.split(tl.permute(tl.reshape(vectors, (LANES, 2, COUNT // 2)), (0, 2, 1)))
        return apart(low, LANES, COUNT // 2) + apart(high, LANES, COUNT // 2)


@triton.jit
def together(columns, LANES: tl.constexpr, COUNT: tl.constexpr):
    """``[LANES, COUNT]`` from a tuple of its columns."""
    if COUNT == 1:
        return tl.reshape(columns[0], (LANES, 1))
    else:
        low = together(columns[: COUNT // 2], LANES, COUNT // 2)
        high = together(columns[COUNT // 2 :], LANES, COUNT // 2)
        return tl.reshape(tl.permute(tl.join(low, high), (0, 2, 1)), (LANES, COUNT))
