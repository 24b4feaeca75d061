"""What attention has to compute, for benchmarks that put times in relation to it."""

from __future__ import annotations

from collections.abc import Sequence


def causal_flops(lengths: Sequence[int], heads: int, width: int, batch: int = 1) -> float:
    """Useful floating-point operations of causal attention over sequences of ``lengths``, forward and backward.

    Two products of ``length * length / 2`` scores in forward, and five in backward.
    """
    return sum(7 * batch * heads * length * length * width for length in lengths)
