"""The experts' GEMMs by QuACK; shapes: :class:`veomni_quack.moe_experts.layer.Products`.

Every call passes its configuration explicitly: without one, QuACK's functions search for it or choose it themselves.

``concat_layout`` names the operand whose gate and up halves QuACK reads, or writes, as interleaved columns.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from importlib import import_module
from typing import Any

import torch
from quack.gemm_interface import default_config, gemm_tuned
from torch import Tensor

from veomni_quack.compiling import check_target, first_call
from veomni_quack.versions import OLD, gated_product, gated_product_backward

check_target()
if not OLD:
    # The gated products import it when they first run. Imported here, what it lacks is known when the kernel is loaded.
    import_module("quack.epilogue.library")

# GEMMs for which QuACK's default for SM90 (tiles of 128 x 192, pingpong) is not the fastest. Milliseconds measured by
# `benchmarks/moe_experts/tune_quack.py` on an H200 for Qwen3-30B-A3B, T = 16384.
_WIDE_TILES = {"tile_m": 128, "tile_n": 256, "pingpong": False}  # backward of the down projection: 1.40 to 0.94
_LARGE_TILES = {"tile_m": 256, "tile_n": 192, "pingpong": False}  # gradient of gate and up: 1.49 to 1.31
_SM90 = 9


def gated(hidden: Tensor, gate_up_proj: Tensor, offsets: Tensor, token_of_row: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of ``hidden`` are gathered while they are loaded; the epilogue computes the activation from float32."""
    rows, width = len(token_of_row), gate_up_proj.shape[1]
    pre, activated = hidden.new_empty(rows, width), hidden.new_empty(rows, width // 2)
    with first_call("gate and up projection", hidden.dtype):
        gated_product(
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
    """Rows of ``dresult`` are gathered while they are loaded.

    The epilogue computes the activation's derivative and the routing weights' gradient, whose partial sums are added in
    a fixed order.
    """
    dpre, activated = torch.empty_like(pre), pre.new_empty(len(pre), pre.shape[1] // 2)
    with first_call("backward of the down projection", pre.dtype):
        dweights = gated_product_backward(
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
    """With ``interleaved``, gate and up alternate in ``rows`` but are halves of each matrix's first dimension."""
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
    """Sums over rows (QuACK's ``k``). ``interleaved`` columns are written as two halves of ``out``'s last dimension."""
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
    """QuACK's default configuration for the GPU; on SM90 with the changes in ``on_hopper``, measured to be faster."""
    default = default_config(operand.device)
    return _kept(default, tuple(on_hopper.items()) if default.device_capacity == _SM90 else ())


@cache
def _kept(default: Any, changes: tuple[tuple[str, Any], ...]) -> Any:
    """``default`` with ``changes``: the same object at each call.

    QuACK 0.6 remembers by the ``id`` of a configuration how it launched a gated product. The ``id`` of one that is gone
    can be that of the next one.
    """
    return replace(default, **dict(changes))
