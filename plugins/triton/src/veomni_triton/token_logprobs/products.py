"""The matrix products around a tile of logits, each written where its result belongs.

Shape suffixes: ``N`` tokens, ``H`` hidden width, ``W`` words of a tile.
"""

from __future__ import annotations

import torch
from torch import Tensor

from veomni_triton.linear import product


def project(
    hidden_NH: Tensor, weight_WH: Tensor, bias_W: Tensor | None, logits_NW: Tensor, in_fixed_order: bool
) -> None:
    """Write the output projection of some words into ``logits_NW``."""
    if in_fixed_order:
        product(hidden_NH, weight_WH, bias_W, logits_NW)
    elif bias_W is None:
        torch.mm(hidden_NH, weight_WH.t(), out=logits_NW)
    else:
        torch.addmm(bias_W, hidden_NH, weight_WH.t(), out=logits_NW)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """``total += a @ b`` with ``total`` in float32."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:  # Triton's interpreter
        total.addmm_(a.float(), b.float())
