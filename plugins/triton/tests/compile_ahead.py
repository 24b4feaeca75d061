"""Calls of this plugin's kernels for layers of real models' widths. Arguments: the dtype, the GPU, and which calls."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from calls_ahead import Call, compile_calls
from veomni_ops.attention import AttentionModule
from veomni_triton import (
    attention,
    causal_conv1d,
    chunk_gated_delta_rule,
    dsa_attention,
    dsa_indexer,
    linear,
    mamba2_scan,
    native_sparse,
    rms_norm,
    rms_norm_gated,
    rotary_pos_emb,
    rotary_pos_emb_vision,
    selective_scan,
    swiglu_mlp,
    token_logprobs,
)


def calls(dtype: torch.dtype) -> Iterator[tuple[str, Call]]:
    """Calls that each have a launch of their own, and give one tensor that wants gradients."""

    def tensor(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=of, requires_grad=True)

    for width in (8192, 16384):
        yield f"norm of {width}", lambda width=width: rms_norm.standard(tensor(8, width), tensor(width), 1e-6)
        yield (
            f"gated norm of {width}",
            lambda width=width: rms_norm_gated.standard(tensor(8, width), tensor(8, width), tensor(width), 1e-6),
        )
    yield "scan of heads of (64, 128)", lambda: _scan(tensor, 64, 128)
    yield "scan of channels", lambda: _selective_scan(tensor, 1536, 16)
    yield "sparse attention", lambda: _sparse_attention(tensor, 128, 512, 64, 128, 64)
    yield "sparse attention, native", lambda: _native_sparse(tensor, (64, 4), (192, 128))
    yield "attention of 128", lambda: _attention(tensor, 128)
    if dtype == torch.float32:  # all other launches have as many elements in a tile as those of 16 bits, or far fewer
        return
    yield "attention of 256", lambda: _attention(tensor, 256)
    for rows in (8, 4096):
        yield f"linear, {rows} rows", lambda rows=rows: linear.standard(tensor(rows, 2048), tensor(2048, 2048))
    heads, angles = (1, 8, 64, 128), (1, 64, 128)
    yield (
        "rotation",
        lambda: rotary_pos_emb.full(tensor(*heads), tensor(*heads), torch.empty(angles), torch.empty(angles))[0],
    )
    patches = (64, 16, 80)
    yield (
        "rotation of patches",
        lambda: rotary_pos_emb_vision.full(tensor(*patches), tensor(*patches), *torch.empty(2, 64, 80))[0],
    )
    yield "SwiGLU", lambda: swiglu_mlp.standard(tensor(64, 8192), tensor(64, 8192))
    yield "gated GELU", lambda: swiglu_mlp.gelu(tensor(64, 8192), tensor(64, 8192))
    for widths in ((128, 128), (256, 256)):
        yield f"delta rule of heads of {widths}", lambda widths=widths: _delta_rule(tensor, *widths)
        yield (
            f"delta rule of heads of {widths}, in a fixed order",
            lambda widths=widths: _delta_rule_in_fixed_order(tensor, *widths),
        )
    yield "scan of heads of (128, 256)", lambda: _scan(tensor, 128, 256)
    yield (
        "convolution along positions",
        lambda: causal_conv1d.standard(tensor(1, 4096, 512), tensor(4096, 4), None, "silu"),
    )
    yield (
        "convolution along channels",
        lambda: causal_conv1d.standard(tensor(1, 512, 4096).mT, tensor(4096, 4), tensor(4096), "silu"),
    )
    yield "log-probabilities in a fixed order", lambda: _logprobs_in_fixed_order(tensor)
    labels = torch.zeros(64, dtype=torch.int64)
    yield "log-probabilities", lambda: token_logprobs.causal(kept_mib=0)(tensor(64, 256), tensor(4096, 256), labels)[0]


def _logprobs_in_fixed_order(tensor: Callable[..., Tensor]) -> Tensor:
    """A token alone, whose tile has all words, and tokens whose tile's rows begin where nothing is aligned."""
    function = token_logprobs.causal_in_fixed_order(kept_mib=0)
    function(tensor(1, 256), tensor(4096, 256), torch.zeros(1, dtype=torch.int64))
    return function(tensor(64, 256), tensor(4099, 256), torch.zeros(64, dtype=torch.int64))[0]


def _delta_rule(tensor: Callable[..., Tensor], key_width: int, value_width: int, **options: Any) -> Tensor:
    batch, length, heads = 1, 256, 4
    query, key = tensor(batch, length, heads, key_width), tensor(batch, length, heads, key_width)
    value = tensor(batch, length, heads, value_width)
    g, beta = tensor(batch, length, heads, of=torch.float32), tensor(batch, length, heads)
    options["use_qk_l2norm_in_kernel"] = True
    return chunk_gated_delta_rule.standard(query, key, value, g, beta, **options)[0]


def _delta_rule_in_fixed_order(tensor: Callable[..., Tensor], key_width: int, value_width: int) -> Tensor:
    """A packed call, a token of a single head after a state, and a call whose tokens begin anywhere."""
    widths = (key_width, key_width, value_width)
    bounds = torch.tensor([0, 3, 256])
    _delta_rule(tensor, key_width, value_width, in_fixed_order=True, cu_seqlens=bounds, output_final_state=True)
    gate, state = tensor(3, 1, 1, of=torch.float32), tensor(3, 1, key_width, value_width, of=torch.float32)
    token = [tensor(3, 1, 1, width) for width in widths]
    chunk_gated_delta_rule.standard_in_fixed_order(
        *token, gate, tensor(3, 1, 1), initial_state=state, use_qk_l2norm_in_kernel=True
    )
    parts = [tensor(2, 17, heads, width + 1)[..., 1:] for heads, width in zip((3, 3, 6), widths, strict=True)]
    gates = tensor(2, 17, 6, of=torch.float32), tensor(2, 17, 6)
    return chunk_gated_delta_rule.standard_in_fixed_order(*parts, *gates, use_qk_l2norm_in_kernel=True)[0]


def _sparse_attention(
    tensor: Callable[..., Tensor], heads: int, value_width: int, rest: int, index_width: int, index_heads: int
) -> Tensor:
    batch, length, top_k = 1, 256, 128
    weights, ranges = tensor(batch, length, index_heads, of=torch.float32), torch.zeros(1, length, 2, dtype=torch.int32)
    index = tensor(batch, length, index_heads, index_width), tensor(batch, length, index_width)
    for visible in (ranges, torch.zeros(1, length, length, dtype=torch.bool)):
        chosen = dsa_indexer.standard(*index, weights, visible, top_k)
    width = value_width + rest
    return dsa_attention.standard(
        tensor(batch, length, heads, width), tensor(batch, length, width), chosen, width**-0.5, value_width
    )


def _native_sparse(tensor: Callable[..., Tensor], heads: tuple[int, int], widths: tuple[int, int]) -> Tensor:
    length, compressed = 4096, 255
    keys, values = (tensor(1, length, heads[1], width) for width in widths)
    of_keys, of_values = (tensor(1, compressed, heads[1], width) for width in widths)
    query, gates = tensor(1, length, heads[0], widths[0]), tensor(1, length, heads[0], 3)
    return native_sparse.native_sparse(query, keys, values, of_keys, of_values, gates)


def _attention(tensor: Callable[..., Tensor], width: int) -> Tensor:
    query, key, value = (tensor(1, heads, 256, width) for heads in (16, 4, 4))
    mask = torch.zeros(1, 1, 256, 256, dtype=query.dtype)
    return attention.attention(AttentionModule(4), query, key, value, mask, softcap=50.0, s_aux=tensor(16))[0]


def _scan(tensor: Callable[..., Tensor], width: int, state: int) -> Tensor:
    batch, length, heads = 1, 256, 8
    x, dt, A = tensor(batch, length, heads, width), tensor(batch, length, heads), tensor(heads, of=torch.float32)
    B, C = (tensor(batch, length, 2, state) for _ in range(2))
    seq_idx = torch.zeros(batch, length, dtype=torch.int32)
    return mamba2_scan.standard(x, dt, A, B, C, A, A, dt_softplus=True, seq_idx=seq_idx)[0]


def _selective_scan(tensor: Callable[..., Tensor], channels: int, state: int) -> Tensor:
    x, dt, z = (tensor(1, channels, 256) for _ in range(3))
    A, D = tensor(channels, state, of=torch.float32), tensor(channels, of=torch.float32)
    B, C = (tensor(1, state, 256) for _ in range(2))
    seq_idx = torch.zeros(1, 256, dtype=torch.int32)
    return selective_scan.standard(x, dt, A, B, C, D, z, D, dt_softplus=True, seq_idx=seq_idx)[0]


if __name__ == "__main__":
    compile_calls(calls, *sys.argv[1:])
