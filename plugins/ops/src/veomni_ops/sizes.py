"""Arithmetic on sizes, for the host.

Triton's own functions for it can be called in kernels as well, and take 2 microseconds of the host for one division.
"""

from __future__ import annotations


def ceil_div(size: int, parts: int) -> int:
    """``size / parts``, rounded up: how many blocks of ``parts`` elements cover ``size``.

    Example:
        >>> ceil_div(130, 64)
        3
    """
    return -(-size // parts)


def power_of_two(size: int) -> int:
    """The smallest power of two that is not below ``size``, as ``tl.arange`` needs it; 1 for a size of 0.

    Example:
        >>> power_of_two(96), power_of_two(128), power_of_two(0)
        (128, 128, 1)
    """
    return 1 << max(size - 1, 0).bit_length()
