"""The sum of native sparse attention's branches by their gates."""

from __future__ import annotations

import triton.language as tl

from veomni_ops.triton_launches import triton_kernel
from veomni_triton.attention_tiles import load, store


@triton_kernel
def mix_kernel(branches, gates, output, rows, width: tl.constexpr, R: tl.constexpr, V: tl.constexpr):
    """The sum of three branches ``[3, rows, V]``, each times its gate."""
    row_R = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    is_row_R = row_R < rows
    mixed_RV = tl.zeros([R, V], dtype=tl.float32)
    for branch in range(3):
        gate_R = tl.load(gates + row_R * 3 + branch, mask=is_row_R, other=0.0).to(tl.float32)
        of_branch_RV = load(branches, branch * rows + row_R, is_row_R, width, V)
        mixed_RV += gate_R[:, None] * of_branch_RV.to(tl.float32)
    store(output, mixed_RV, row_R, is_row_R, width, V)


@triton_kernel
def unmix_kernel(doutput, branches, gates, dgates, means, rows, width: tl.constexpr, R: tl.constexpr, V: tl.constexpr):
    """The gradients of gates, and times the gates the means of the gradients of each branch's weights."""
    row_R = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    is_row_R = row_R < rows
    upstream_RV = load(doutput, row_R, is_row_R, width, V).to(tl.float32)
    for branch in range(3):
        gate_R = tl.load(gates + row_R * 3 + branch, mask=is_row_R, other=0.0).to(tl.float32)
        at_R = branch * rows + row_R
        dgate_R = tl.sum(upstream_RV * load(branches, at_R, is_row_R, width, V).to(tl.float32), 1)
        tl.store(dgates + row_R * 3 + branch, dgate_R.to(dgates.dtype.element_ty), mask=is_row_R)
        tl.store(means + at_R, dgate_R * gate_R, mask=is_row_R)
