"""The products, by QuACK's grouped matrix products; see :class:`veomni_quack.moe_experts.layer.Products`.

Each call states its configuration. QuACK's search over all of them is never started, and its public functions are
passed by, because they choose by themselves where none is stated.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from quack.gemm_interface import default_config, gemm_dgated_tuned, gemm_gated_tuned, gemm_tuned
from torch import Tensor

from veomni_quack.compiling import check_target, first_call

check_target()

# Where QuACK's default for SM90 (tiles of 128 x 192, two consumers in turn) is not the fastest: milliseconds that
# `benchmarks/tune_quack.py` found on an H200 for Qwen3-30B-A3B, T = 16384.
_WIDE_TILES = {"tile_m": 128, "tile_n": 256, "pingpong": False}  # backward of the down projection: 1.40 to 0.94
_LARGE_TILES = {"tile_m": 256, "tile_n": 192, "pingpong": False}  # gradient of gate and up: 1.49 to 1.31
_SM90 = 9


def gated(hidden: Tensor, gate_up_proj: Tensor, offsets: Tensor, token_of_row: Tensor) -> tuple[Tensor, Tensor]:
    """Gathers in the load of its first operand; the activation is computed from float32, in the product's epilogue."""
    rows, width = len(token_of_row), gate_up_proj.shape[1]
    pre, activated = hidden.new_empty(rows, width), hidden.new_empty(rows, width // 2)
    with first_call("gate and up projection", hidden.dtype):
        gemm_gated_tuned.fn(
            hidden,
            gate_up_proj.mT,
            pre,
            activated,
            activation="swiglu",
            cu_seqlens_m=offsets,
            A_idx=token_of_row,
            concat_layout=("B",),
            config=_configuration(hidden),
        )
    return pre, activated


def gated_backward(
    dresult: Tensor, down_proj: Tensor, pre: Tensor, weights: Tensor, offsets: Tensor, token_of_row: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gathers in the load; the derivative and the weights' gradient, by partial sums in order, are its epilogue."""
    dpre, activated = torch.empty_like(pre), pre.new_empty(len(pre), pre.shape[1] // 2)
    with first_call("backward of the down projection", pre.dtype):
        dweights: Tensor = gemm_dgated_tuned.fn(
            dresult,
            down_proj,
            pre,
            dpre,
            activated,
            colvec_scale=weights,
            activation="swiglu",
            colvec_reduce=True,
            cu_seqlens_m=offsets,
            A_idx=token_of_row,
            dynamic_scheduler=False,
            config=_configuration(dresult, **_WIDE_TILES),
        )
    return dpre, activated, dweights


def rows(rows: Tensor, matrices: Tensor, offsets: Tensor, out: Tensor, interleaved: bool) -> None:
    """Interleaved rows meet matrices whose first dimension is two halves, which QuACK reads side by side."""
    with first_call("product of rows", rows.dtype, "interleaved" if interleaved else "plain"):
        gemm_tuned.fn(
            rows,
            matrices,
            out,
            cu_seqlens_m=offsets,
            concat_layout=("B",) if interleaved else None,
            config=_configuration(rows),
        )


def gradient(
    by_token: Tensor, rows: Tensor, offsets: Tensor, token_of_row: Tensor, out: Tensor, interleaved: bool
) -> None:
    """The rows are what is summed over; interleaved ones are written as two halves of ``out``'s last dimension."""
    with first_call("weight gradient", rows.dtype, "interleaved" if interleaved else "plain"):
        gemm_tuned.fn(
            by_token.T,
            rows,
            out,
            cu_seqlens_k=offsets,
            A_idx=token_of_row,
            concat_layout=("out",) if interleaved else None,
            config=_configuration(rows, **_LARGE_TILES),
        )


def _configuration(operand: Tensor, **on_hopper: Any) -> Any:
    """QuACK's default for the GPU, with the changes that were measured to be faster on SM90."""
    default = default_config(operand.device)
    return replace(default, **on_hopper) if default.device_capacity == _SM90 else default
