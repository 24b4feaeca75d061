"""Adds the partial gradients of a parameter, one row per program of backward, always in the same order (no atomics)."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from veomni_ops.sizes import ceil_div
from veomni_ops.triton_launches import triton_kernel

COLUMNS = 16  # per program: 64 bytes of float32, two memory sectors, so that H = 4096 already makes 256 programs


def sum_partials(partials: Tensor, total: Tensor) -> None:
    """Write the sums over the first dimension of ``partials`` into ``total``, rounded once.

    Args:
        partials: ``[P, H]`` or ``[P, A, B]``, float32, with contiguous ``[H]`` or ``[A, B]``.
        total: ``[H]`` or ``[A, B]`` of any strides, written; zeros where P is 0.
    """
    columns = total.numel()
    inner = total.shape[-1]
    outer_stride = total.stride(0) if total.dim() == 2 else 0
    _sum_kernel[(ceil_div(columns, COLUMNS),)](
        partials,
        total,
        len(partials),
        partials.stride(0),
        outer_stride,
        total.stride(-1),
        WIDTH=columns,
        INNER=inner,
        ROWS=256,
        COLUMNS=COLUMNS,
    )


# P rows of partial sums, H = WIDTH columns. P depends on the batch: if it were specialised, batches would recompile.
@triton_kernel(do_not_specialize=["programs"])
def _sum_kernel(
    partials,  # [P, H], float32, rows row_stride apart
    total,  # [H / INNER, INNER], written
    programs,  # P
    row_stride,
    outer_stride,  # of total
    inner_stride,
    WIDTH: tl.constexpr,
    INNER: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)  # [COLUMNS]
    # Row p is always added at place p % ROWS, and the places in tl.sum's order: P and H alone fix the order of a sum.
    found = tl.zeros((ROWS, COLUMNS), tl.float32)  # [ROWS, COLUMNS]
    for first in range(0, programs, ROWS):
        row = (first + tl.arange(0, ROWS)).to(tl.int64)  # [ROWS]; P * H can exceed 2**31
        inside = (row < programs)[:, None] & (column < WIDTH)[None, :]
        found += tl.load(partials + row[:, None] * row_stride + column[None, :], mask=inside, other=0.0)
    at = total + column // INNER * outer_stride + column % INNER * inner_stride
    tl.store(at, tl.sum(found, axis=0).to(total.dtype.element_ty), mask=column < WIDTH)
