"""What the three products share: the order of their tiles, and how tiles are loaded and stored.

With ``DESCRIBED``, operands are TMA descriptors (SM90 and SM100), and the hardware checks bounds. Otherwise they are
pointers, and masks or clamped indices keep a tile within its operand. A group is the rows of one expert, adjacent after
sorting. A ragged descriptor is bounded by one group: a tile that reaches beyond it reads zeros and writes nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.tools.ragged_tma import to_ragged_indices

# N rows, one per route and sorted by expert; E experts; C columns of an operand. BLOCK_M x BLOCK_N is a tile of a
# product, BLOCK_R x BLOCK_C a block of an operand: rows by columns. All indices are counted in elements, but `m`, `n`
# and `tile`, which count tiles.


@triton.jit
def tile_position(tile, m_tiles, n_tiles, GROUP_M: tl.constexpr):
    """``(m, n)`` of a tile of an ``m_tiles x n_tiles`` grid, in bands of ``GROUP_M`` tile rows.

    Within a band, tiles go down the columns: the programs that run at one time share operand blocks in the L2 cache.
    """
    per_group = GROUP_M * n_tiles
    first = (tile // per_group) * GROUP_M
    # The last band may have fewer tile rows; with GROUP_M here its tiles would be numbered past the grid.
    size = tl.minimum(m_tiles - first, GROUP_M)
    inside = tile % per_group
    return first + inside % size, inside // size


@triton.jit
def tile_rows(tiles, offsets, max_tiles, m):
    """The expert of row tile ``m``, the tile's first row, its group's first row and its group's size."""
    # tiles is one buffer: [0] the number of tiles, then max_tiles experts, then max_tiles first rows.
    expert = tl.load(tiles + 1 + m)
    row = tl.load(tiles + 1 + max_tiles + m)
    start = tl.load(offsets + expert)  # offsets has E + 1 entries, so expert + 1 is always there
    return expert, row, start, tl.load(offsets + expert + 1) - start


@triton.jit
def load_within(pointers, place, length, EVEN: tl.constexpr):
    """A block whose elements exist where ``place < length``; zeros elsewhere. ``EVEN`` states that all exist."""
    # Without a mask, loads stay as wide as the alignment allows, and the K loop has no comparison per element.
    if EVEN:
        return tl.load(pointers)
    # Zeros, because the block is an operand of a dot along this dimension.
    return tl.load(pointers, mask=place < length, other=0.0)


@triton.jit
def load_group(
    source,  # [N, width], contiguous, or a ragged descriptor of it with blocks [1, 1, BLOCK_R, BLOCK_C]
    start,  # the group's first row
    size,  # the group's number of rows
    row,  # the block's first row, counted from start
    column,  # the block's first column
    width,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    DESCRIBED: tl.constexpr,
):
    """The block ``[BLOCK_R, BLOCK_C]`` at ``(row, column)`` of a group; rows beyond the group read as zeros.

    Zeros, because the callers reduce over rows: the next expert's rows must add nothing. Columns beyond ``width`` hold
    anything; the caller masks them when it stores.
    """
    if DESCRIBED:
        # A ragged descriptor has two leading dimensions that shift the base address, so that the hardware's bound on
        # the row dimension falls on the group's last row.
        end, last, place = to_ragged_indices(start, size, row)
        block = tl.reshape(source.load([end, last, place, column]), (BLOCK_R, BLOCK_C))
    else:
        rows = row + tl.arange(0, BLOCK_R)  # [BLOCK_R]
        # Wrapped instead of masked: always a valid address, and no comparison per element.
        columns = (column + tl.arange(0, BLOCK_C)) % width  # [BLOCK_C]
        # int64, since N * width can exceed 2**31.
        pointers = source + (start + rows)[:, None].to(tl.int64) * width + columns[None, :]  # [BLOCK_R, BLOCK_C]
        block = tl.load(pointers, mask=(rows < size)[:, None], other=0.0)
    return block


@triton.jit
def store_group(
    target,  # [N, stride] or some columns of it, or a ragged descriptor with blocks [1, 1, BLOCK_R, BLOCK_C]
    value,  # [BLOCK_R, BLOCK_C]
    start,
    size,
    row,
    column,
    width,  # columns that may be written; less than stride where target is a part of a wider tensor
    stride,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    DESCRIBED: tl.constexpr,
):
    """The inverse of :func:`load_group`, rounded to target's dtype; nothing is written beyond the group or ``width``.

    The rows after the group belong to the next expert, whose tile another program writes.
    """
    if DESCRIBED:
        # The descriptor knows its own width and stride, so only the group has to be named.
        end, last, place = to_ragged_indices(start, size, row)
        target.store([end, last, place, column], tl.reshape(value.to(target.dtype), (1, 1, BLOCK_R, BLOCK_C)))
    else:
        rows = row + tl.arange(0, BLOCK_R)  # [BLOCK_R]
        # Not wrapped as in load_group: two programs would write the same element.
        columns = column + tl.arange(0, BLOCK_C)  # [BLOCK_C]
        pointers = target + (start + rows)[:, None].to(tl.int64) * stride + columns[None, :]
        mask = (rows < size)[:, None] & (columns < width)[None, :]
        tl.store(pointers, value.to(target.dtype.element_ty), mask=mask)


@triton.jit
def halves(tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The left and the right half of ``tile[ROWS, COLUMNS]``, each ``[ROWS, COLUMNS // 2]``."""
    # tl.split takes a last dimension of two: [ROWS, 2, COLUMNS // 2] becomes [ROWS, COLUMNS // 2, 2].
    return tl.split(tl.permute(tl.reshape(tile, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))


@triton.jit
def every_other(tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The even and the odd columns of ``tile[ROWS, COLUMNS]``, each ``[ROWS, COLUMNS // 2]``."""
    return tl.split(tl.reshape(tile, (ROWS, COLUMNS // 2, 2)))
