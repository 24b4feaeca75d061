"""QuACK's products and loss with the parameters of either version, in plain PyTorch: what the calls are tested with."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import plain_experts
import plain_loss
import torch


@dataclass(frozen=True)
class GemmConfig:
    """As QuACK's, in what the plugin reads and changes."""

    tile_m: int = 128
    tile_n: int = 192
    pingpong: bool = True
    device_capacity: int = 9


def default_config(device):
    return GemmConfig()


def gemm_tuned(
    A,
    B,
    out,
    C=None,
    bias=None,
    alpha=1.0,
    beta=1.0,
    cu_seqlens_m=None,
    cu_seqlens_k=None,
    A_idx=None,
    batch_idx_permute=None,
    add_to_output=False,
    dynamic_scheduler=False,
    config=None,
    rounding_mode=0,
    sr_seed=0,
    concat_layout=None,
):
    assert isinstance(config, GemmConfig)
    if cu_seqlens_m is not None:
        plain_experts.rows(A, B, cu_seqlens_m, out, interleaved=concat_layout == ("B",))
    elif cu_seqlens_k is not None:
        plain_experts.gradient(A.T, B, cu_seqlens_k, A_idx, out, interleaved=concat_layout == ("out",))
    elif alpha is beta and isinstance(alpha, torch.Tensor):
        plain_loss.scaled_sum(A.T, B, C, alpha, out)
    else:
        plain_loss.add_product(A.T, B, out, first=not add_to_output)


def _gated(A, B, pre, activated, offsets, token_of_row, **options):
    assert options == {"activation": "swiglu", "concat_layout": ("B",), "config": GemmConfig()}
    for mine, theirs in zip((pre, activated), plain_experts.gated(A, B.mT, offsets, token_of_row), strict=True):
        mine.copy_(theirs)


def _dgated(A, B, pre, dpre, activated, weights, offsets, token_of_row, **options):
    wanted = GemmConfig(tile_n=256, pingpong=False)
    assert options == {"activation": "swiglu", "reduce": True, "dynamic": False, "config": wanted}
    *found, sums = plain_experts.gated_backward(A, B, pre, weights, offsets, token_of_row)
    for mine, theirs in zip((dpre, activated), found, strict=True):
        mine.copy_(theirs)
    return sums


def gemm_gated_tuned(
    A,
    B,
    preact_out,
    postact_out,
    C=None,
    bias=None,
    activation="swiglu",
    cu_seqlens_m=None,
    A_idx=None,
    dynamic_scheduler=False,
    config=None,
    concat_layout=None,
):
    options = {"activation": activation, "concat_layout": concat_layout, "config": config}
    _gated(A, B, preact_out, postact_out, cu_seqlens_m, A_idx, **options)


def gemm_dgated_tuned(
    A,
    B,
    PreAct,
    dx_out,
    postact_out,
    colvec_scale=None,
    activation="swiglu",
    colvec_reduce=False,
    cu_seqlens_m=None,
    A_idx=None,
    dynamic_scheduler=True,
    config=None,
):
    options = {"activation": activation, "reduce": colvec_reduce, "dynamic": dynamic_scheduler, "config": config}
    return _dgated(A, B, PreAct, dx_out, postact_out, colvec_scale, cu_seqlens_m, A_idx, **options)


def gemm_gated(
    A,
    B,
    C=None,
    bias=None,
    activation=None,
    alpha=1.0,
    preact_out=None,
    postact_out=None,
    out_dtype=None,
    postact_dtype=None,
    cu_seqlens_m=None,
    A_idx=None,
    store_preact=True,
    dynamic_scheduler=False,
    tuned=True,
    config=None,
    concat_layout=None,
    split_k=1,
    split_k_mode=0,
):
    assert not tuned
    options = {"activation": activation, "concat_layout": concat_layout, "config": config}
    _gated(A, B, preact_out, postact_out, cu_seqlens_m, A_idx, **options)
    return preact_out, postact_out


def gemm_dgated(
    A,
    B,
    PreAct,
    activation=None,
    dx_out=None,
    postact_out=None,
    out_dtype=None,
    postact_dtype=None,
    colvec_scale=None,
    colvec_reduce=False,
    cu_seqlens_m=None,
    A_idx=None,
    dynamic_scheduler=True,
    tuned=True,
    config=None,
    split_k=1,
    split_k_mode=0,
):
    assert not tuned
    options = {"activation": activation, "reduce": colvec_reduce, "dynamic": dynamic_scheduler, "config": config}
    sums = _dgated(A, B, PreAct, dx_out, postact_out, colvec_scale, cu_seqlens_m, A_idx, **options)
    return dx_out, postact_out, sums


def _cross_entropy(x, target, target_logit, loss, lse, dx, ignore_index):
    assert target_logit is None and lse is None and dx is x
    plain_loss.losses_and_gradient(x, target, loss, ignore_index)


def cross_entropy_of_0_4(x, target, target_logit, loss, lse, dx, ignore_index=-100):
    _cross_entropy(x, target, target_logit, loss, lse, dx, ignore_index)


def cross_entropy_of_0_6(x, target, target_logit, loss, lse, dx, weight, ignore_index=-100):
    assert weight is None
    _cross_entropy(x, target, target_logit, loss, lse, dx, ignore_index)


_CACHE = {"CACHE_ENABLED": False, "get_cache_path": lambda: ""}
_PRODUCTS = {"default_config": default_config, "gemm_tuned": SimpleNamespace(fn=gemm_tuned)}

# The modules of each version, and what the plugin imports from them.
LIBRARIES = {
    "0.4.1": {
        "quack": {"__version__": "0.4.1"},
        "quack.cache_utils": _CACHE,
        "quack.cross_entropy": {"cross_entropy_fwd_out": cross_entropy_of_0_4},
        "quack.gemm_interface": {
            **_PRODUCTS,
            "gemm_gated_tuned": SimpleNamespace(fn=gemm_gated_tuned),
            "gemm_dgated_tuned": SimpleNamespace(fn=gemm_dgated_tuned),
        },
    },
    "0.6.5": {
        "quack": {"__version__": "0.6.5"},
        "quack.cache": _CACHE,
        "quack.cross_entropy": {"cross_entropy_fwd_out": cross_entropy_of_0_6},
        "quack.epilogue": {},
        "quack.epilogue.library": {},
        "quack.gemm_interface": {**_PRODUCTS, "gemm_gated": gemm_gated, "gemm_dgated": gemm_dgated},
    },
}
