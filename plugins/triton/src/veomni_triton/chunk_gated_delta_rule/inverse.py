"""The inverse of a unit lower triangular matrix in registers, by substitution in blocks and products between them.

A product of powers, ``(I - A) (I + A^2) (I + A^4) ...``, would take no substitution. But its powers grow like binomials
where keys resemble each other, and then cancel: with 64 equal keys by 18 digits.

Shape legend: ``C`` tokens of a chunk.
"""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = tl.constexpr(16)


@triton.jit
def unit_lower_inverse(system_CC, transposed_CC, C: tl.constexpr, PRECISION: tl.constexpr):
    """``(I + system)^-1`` of a strictly lower triangular system, which is handed over transposed too. In float32."""
    row_C1, column_1C = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    is_block_CC = (row_C1 // BLOCK) == (column_1C // BLOCK)
    # All diagonal blocks at once, from their last column to their first: X (I + A) = I says that column j of X is that
    # of I less X times column j of A.
    blocks_CC = tl.where(is_block_CC, transposed_CC, 0.0)
    inverse_CC = tl.where(row_C1 == column_1C, 1.0, 0.0)
    for back in range(1, BLOCK):
        j = BLOCK - 1 - back
        column_C = tl.sum(tl.where(row_C1 % BLOCK == j, blocks_CC, 0.0), axis=0)
        product_C = tl.sum(inverse_CC * column_C[None, :], axis=1)
        is_written_CC = is_block_CC & (column_1C % BLOCK == j)
        inverse_CC = tl.where(is_written_CC, inverse_CC - product_C[:, None], inverse_CC)
    if C > 16:
        inverse_CC = _joined(inverse_CC, system_CC, 16, C, PRECISION)
    if C > 32:
        inverse_CC = _joined(inverse_CC, system_CC, 32, C, PRECISION)
    return inverse_CC


@triton.jit
def _joined(inverse_CC, system_CC, SIZE: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr):
    """The inverse of blocks of twice ``SIZE`` from that of blocks of ``SIZE``: below, it is ``- X22 A21 X11``."""
    row_C1, column_1C = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    is_pair_CC = (row_C1 // (2 * SIZE)) == (column_1C // (2 * SIZE))
    is_below_CC = is_pair_CC & ((row_C1 // SIZE) > (column_1C // SIZE))
    below_CC = tl.where(is_below_CC, system_CC, 0.0)
    left_CC = tl.dot(inverse_CC, below_CC, input_precision=PRECISION)
    return inverse_CC - tl.dot(left_CC, inverse_CC, input_precision=PRECISION)
