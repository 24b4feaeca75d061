"""What the three products share: the order of their tiles, and how tiles are read and written.

Where ``DESCRIBED``, operands are tensor descriptors that the copy engine reads and writes (TMA, SM90); elsewhere they
are pointers. A ragged descriptor ends at its group's last row, so that a tile neither reads nor writes a neighbour's.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.ragged_tma import create_ragged_descriptor, to_ragged_indices
from triton.tools.tensor_descriptor import TensorDescriptor

COPY_ENGINE_ALIGNMENT = 16  # bytes, of addresses and of every stride but the last


def can_be_described(tensor: Tensor) -> bool:
    """Whether the copy engine can address this: 16-bit values in aligned lines."""
    return tensor.element_size() == 2 and _has_copy_engine(tensor.device) and has_aligned_lines(tensor)


def has_aligned_lines(tensor: Tensor) -> bool:
    """Whether every line is contiguous and begins where the copy engine can begin to read."""
    if tensor.stride(-1) != 1:
        return False
    places = (tensor.data_ptr(), *(stride * tensor.element_size() for stride in tensor.stride()[:-1]))
    return all(place % COPY_ENGINE_ALIGNMENT == 0 for place in places)


@functools.cache
def _has_copy_engine(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def described(tensor: Tensor, block: list[int]) -> TensorDescriptor:
    """``tensor`` as blocks for the copy engine."""
    return TensorDescriptor.from_tensor(tensor, block)


def described_rows(tensor: Tensor, block: list[int]) -> TensorDescriptor:
    """``tensor[N, …]`` as blocks of rows that end where their group does."""
    return create_ragged_descriptor(tensor, block)


@triton.jit
def tile_position(tile, m_tiles, n_tiles, GROUP_M: tl.constexpr):
    """Row and column of a tile, ``GROUP_M`` rows of tiles at a time, so that tiles in flight share their operands."""
    per_group = GROUP_M * n_tiles
    first = (tile // per_group) * GROUP_M
    size = tl.minimum(m_tiles - first, GROUP_M)
    inside = tile % per_group
    return first + inside % size, inside // size


@triton.jit
def tile_rows(tiles, offsets, max_tiles, m):
    """The expert of row tile ``m``, the tile's first row, its group's first row and its group's size."""
    expert = tl.load(tiles + 1 + m)
    row = tl.load(tiles + 1 + max_tiles + m)
    start = tl.load(offsets + expert)
    return expert, row, start, tl.load(offsets + expert + 1) - start


@triton.jit
def load_within(pointers, place, length, EVEN: tl.constexpr):
    """A block of which the places below ``length`` exist; zero beyond. ``EVEN`` says that all do."""
    if EVEN:
        return tl.load(pointers)
    return tl.load(pointers, mask=place < length, other=0.0)


@triton.jit
def load_group(
    source, start, size, row, column, width, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, DESCRIBED: tl.constexpr
):
    """``BLOCK_R`` rows of a group from its row ``row`` on, and ``BLOCK_C`` columns; zero beyond the group."""
    if DESCRIBED:
        end, last, place = to_ragged_indices(start, size, row)
        block = tl.reshape(source.load([end, last, place, column]), (BLOCK_R, BLOCK_C))
    else:
        rows = row + tl.arange(0, BLOCK_R)
        columns = (column + tl.arange(0, BLOCK_C)) % width
        pointers = source + (start + rows)[:, None].to(tl.int64) * width + columns[None, :]
        block = tl.load(pointers, mask=(rows < size)[:, None], other=0.0)
    return block


@triton.jit
def store_group(
    target,
    value,
    start,
    size,
    row,
    column,
    width,
    stride,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    DESCRIBED: tl.constexpr,
):
    """The inverse of :func:`load_group`; nothing is written beyond the group or ``width``."""
    if DESCRIBED:
        end, last, place = to_ragged_indices(start, size, row)
        target.store([end, last, place, column], tl.reshape(value.to(target.dtype), (1, 1, BLOCK_R, BLOCK_C)))
    else:
        rows = row + tl.arange(0, BLOCK_R)
        columns = column + tl.arange(0, BLOCK_C)
        pointers = target + (start + rows)[:, None].to(tl.int64) * stride + columns[None, :]
        mask = (rows < size)[:, None] & (columns < width)[None, :]
        tl.store(pointers, value.to(target.dtype.element_ty), mask=mask)


@triton.jit
def halves(tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The left and the right half of ``tile[ROWS, COLUMNS]``."""
    return tl.split(tl.permute(tl.reshape(tile, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))


@triton.jit
def every_other(tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The even and the odd columns of ``tile[ROWS, COLUMNS]``."""
    return tl.split(tl.reshape(tile, (ROWS, COLUMNS // 2, 2)))
