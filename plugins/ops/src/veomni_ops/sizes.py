"""Arithmetic on sizes, for the host.

Triton's own functions for it can be called in kernels as well, and take 2 microseconds of the host for one division.
"""

from __future__ import annotations


def ceil_div(size: int, parts: int) -> int:
    """``size / parts``, rounded up: how many blocks of ``parts`` elements cover ``size``."""
    return -(-size // parts)


def power_of_two(size: int) -> int:
    """The smallest power of two that is not below ``size``, as ``tl.arange`` needs it; 1 for a size of 0."""
    return 1 << max(size - 1, 0).bit_length()
