"""Adds the partial gradients of the weight, one row per program of backward, always in the same order (no atomics)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 16  # per program: 64 bytes of float32, two memory sectors, so that H = 4096 already makes 256 programs


def sum_partials(partials: Tensor, total: Tensor) -> None:
    """Write the column sums of ``partials [P, H]`` (float32) into ``total [H]``, rounded once; zeros where P is 0."""
    programs, width = partials.shape
    _sum_kernel[(triton.cdiv(width, COLUMNS),)](partials, total, programs, WIDTH=width, ROWS=256, COLUMNS=COLUMNS)


# P rows of partial sums, H = WIDTH columns. P depends on the batch: if it were specialised, batches would recompile.
@triton.jit(do_not_specialize=["programs"])
def _sum_kernel(
    partials,  # [P, H], float32
    total,  # [H], written
    programs,  # P
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)  # [COLUMNS]
    # Row p is always added at place p % ROWS, and the places in tl.sum's order: P and H alone fix the order of a sum.
    found = tl.zeros((ROWS, COLUMNS), tl.float32)  # [ROWS, COLUMNS]
    for first in range(0, programs, ROWS):
        row = first + tl.arange(0, ROWS)  # [ROWS]
        inside = (row < programs)[:, None] & (column < WIDTH)[None, :]
        found += tl.load(partials + row[:, None] * WIDTH + column[None, :], mask=inside, other=0.0)
    tl.store(total + column, tl.sum(found, axis=0).to(total.dtype.element_ty), mask=column < WIDTH)
