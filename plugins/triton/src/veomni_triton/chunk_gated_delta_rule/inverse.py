"""The inverse of a unit lower triangular matrix in registers, by substitution in blocks and products between them.

A product of powers, ``(I - A) (I + A^2) (I + A^4) ...``, would take no substitution. But its powers grow like binomials
where keys resemble each other, and then cancel: with 64 equal keys by 18 digits.

Shape legend: ``C`` tokens of a chunk, ``N`` blocks of it, ``B`` rows of a block.
"""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = tl.constexpr(16)


@triton.jit
def unit_lower_inverse(system_CC, C: tl.constexpr, PRECISION: tl.constexpr):
    """``(I + system)^-1`` of a strictly lower triangular system, in float32."""
    inverse_CC = _inverse_of_blocks(system_CC, C)
    if C > 16:
        inverse_CC = _joined(inverse_CC, system_CC, 16, C, PRECISION)
    if C > 32:
        inverse_CC = _joined(inverse_CC, system_CC, 32, C, PRECISION)
    return inverse_CC


@triton.jit
def _inverse_of_blocks(system_CC, C: tl.constexpr):
    """The inverses of the blocks on the diagonal, with zeros around them."""
    N: tl.constexpr = C // BLOCK  # blocks
    number_N = tl.arange(0, N)
    row_B, column_B = tl.arange(0, BLOCK)[None, :, None], tl.arange(0, BLOCK)[None, None, :]
    is_diagonal_NBNB = number_N[:, None, None, None] == number_N[None, None, :, None]
    blocks_NBB = tl.sum(tl.where(is_diagonal_NBNB, tl.reshape(system_CC, [N, BLOCK, N, BLOCK]), 0.0), axis=2)
    transposed_NBB = tl.permute(blocks_NBB, (0, 2, 1))
    # From the last column to the first: X (I + A) = I says that column j of X is that of I less X times column j of A.
    inverse_NBB = tl.where(row_B == column_B, 1.0, tl.zeros([N, BLOCK, BLOCK], tl.float32))
    for back in tl.static_range(2, BLOCK + 1):
        column_NB = tl.sum(tl.where(row_B == BLOCK - back, transposed_NBB, 0.0), axis=1)
        product_NB = tl.sum(inverse_NBB * column_NB[:, None, :], axis=2)
        inverse_NBB = tl.where(column_B == BLOCK - back, inverse_NBB - product_NB[:, :, None], inverse_NBB)
    return tl.reshape(tl.where(is_diagonal_NBNB, inverse_NBB[:, :, None, :], 0.0), [C, C])


@triton.jit
def _joined(inverse_CC, system_CC, SIZE: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr):
    """The inverse of blocks of twice ``SIZE`` from that of blocks of ``SIZE``: below, it is ``- X22 A21 X11``."""
    row_C1, column_1C = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    is_pair_CC = (row_C1 // (2 * SIZE)) == (column_1C // (2 * SIZE))
    is_below_CC = is_pair_CC & ((row_C1 // SIZE) > (column_1C // SIZE))
    below_CC = tl.where(is_below_CC, system_CC, 0.0)
    left_CC = tl.dot(inverse_CC, below_CC, input_precision=PRECISION)
    return inverse_CC - tl.dot(left_CC, inverse_CC, input_precision=PRECISION)
