"""The softplus of time steps, and its derivative."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def softplus(x):
    """``log(1 + exp(x))``, with all digits where it is small, and its derivative."""
    small = tl.exp(-tl.abs(x))
    above = 1.0 + small
    # What the sum has lost of `small` is made up for: log(above) is off by as much as above is, as a share.
    lost = above - 1.0
    log = tl.where(lost == 0.0, small, tl.log(above) * (small / tl.where(lost == 0.0, 1.0, lost)))
    share = tl.where(x >= 0.0, 1.0, small) / above
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL) + log, share
