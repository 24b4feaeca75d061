"""attention by FlashAttention 4 (the package flash-attn-4, in CuTe DSL), forward and backward as custom operators.

The library compiles a kernel at the first call of each shape class, which ``torch.compile`` can't trace. So forward and
backward are custom operators with fake implementations, and the graph doesn't break. Inside them, operands that CuTe
can't read because of their alignment are copied.

Sinks are applied exactly, through the library's log-sum-exp, which is differentiable: a sink ``b`` takes the share
``exp(b) / (exp(b) + exp(lse))`` of a row's softmax, so the output is multiplied by ``sigmoid(lse - b)``. The library's
own ``learnable_sink`` gives ``b`` no gradient (4.0.0b13).
"""

from __future__ import annotations

from typing import Any

import torch
from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd
from torch import Tensor, library

from veomni_core.kernels import aligned, empty_like_aligned, first_derivatives_only
from veomni_flash_attn.by_lengths import Bounds, Options, attend, padded_to, unsupported_heads
from veomni_flash_attn.limits import WIDEST_HEAD_4

_ONE_WIDTH = (64, 128)  # of queries, keys and values
_LATENT = (192, 128)  # of queries and keys, and of values


class FlashAttention4:
    """Heads of 8 to 192, in multiples of 8; bfloat16 and float16; forward and backward on SM90 and above."""

    name = "flash_attention_4"

    def refuses(self, query: Tensor, value: Tensor, options: Options, packed: bool) -> list[str]:
        problems = ["dropout"] if options.dropout else []
        if options.softcap and packed:
            problems.append("a softcap over packed or padded sequences, for which the library has no backward")
        return problems + unsupported_heads(query, value, WIDEST_HEAD_4)

    def dense(self, query: Tensor, key: Tensor, value: Tensor, options: Options) -> Tensor:
        return _attend(query, key, value, (None, None, 0, 0), options)

    def packed(self, query: Tensor, key: Tensor, value: Tensor, bounds: Bounds, options: Options) -> Tensor:
        lengths = (bounds.queries, bounds.keys, bounds.longest_query, bounds.longest_key)
        return _attend(query, key, value, lengths, options)


def _attend(query: Tensor, key: Tensor, value: Tensor, lengths: tuple[Any, ...], options: Options) -> Tensor:
    window = -1 if options.window is None else options.window
    numbers = (options.scaling, options.causal, window, options.softcap)
    queries, keys, parts = _fitting(query, key, value)
    results = [_Attention.apply(queries, keys, part, *lengths, *numbers) for part in parts]
    output = torch.cat([output for output, _ in results], dim=-1) if len(results) > 1 else results[0][0]
    return _with_sinks(output[..., : value.shape[-1]], results[0][1].transpose(-1, -2), options)


def _fitting(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Queries, keys, and values in parts, of widths for which the library is right on SM90 (4.0.0b13).

    Those are 64 and 128, and 192 for ungrouped queries and keys beside values of 128. Of other widths some don't
    compile, and some give wrong gradients: with heads of 80, queries' were off by 200 %.
    """
    widest = max(query.shape[-1], value.shape[-1])
    if widest <= _ONE_WIDTH[-1]:
        width = next(width for width in _ONE_WIDTH if width >= widest)
        query, key, value = padded_to(width, query, key, value)
        return query, key, (value,)
    groups = query.shape[-2] // key.shape[-2]
    if groups > 1:
        key, value = (each.repeat_interleave(groups, dim=-2) for each in (key, value))
    query, key = padded_to(_LATENT[0], query, key)
    return query, key, tuple(padded_to(_LATENT[1], *value.split(_LATENT[1], dim=-1)))


def _with_sinks(output: Tensor, lse: Tensor, options: Options) -> Tensor:
    """``output[..., S, Hq, Dv]`` after sinks ``[Hq]``, by ``lse[..., S, Hq]``."""
    if options.sinks is None:
        return output
    sinks = options.sinks.float()
    # An infinite sink gives NaN, as in a softmax: zeros would hide that a parameter has overflowed.
    kept = torch.sigmoid(lse - (sinks + 0.0 * sinks))
    return (output * kept.unsqueeze(-1)).to(output.dtype)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
        output, lse = _forward(query, key, value, *settings)
        query_bounds, key_bounds, *ctx.numbers = settings
        ctx.save_for_backward(query, key, value, output, lse, query_bounds, key_bounds)
        ctx.set_materialize_grads(False)  # the log-sum-exp has a gradient only with sinks
        return output, lse

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        query, key, value, output, lse, query_bounds, key_bounds = ctx.saved_tensors
        upstream, upstream_lse = gradients
        upstream = torch.zeros_like(output) if upstream is None else upstream
        results = _backward(
            query, key, value, output, lse, upstream, upstream_lse, query_bounds, key_bounds, *ctx.numbers
        )
        return *results, *(None,) * 8


_HEADS = "Tensor query, Tensor key, Tensor value"
_SETTINGS = (
    "Tensor? query_bounds, Tensor? key_bounds, SymInt longest_query, SymInt longest_key, "
    "float scaling, bool causal, SymInt window, float softcap"
)


@library.custom_op(
    "veomni_flash_attn::flash_attention_4",
    mutates_args=(),
    schema=f"({_HEADS}, {_SETTINGS}) -> (Tensor output, Tensor lse)",
)
def _forward(query: Tensor, key: Tensor, value: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
    *others, softcap = settings
    keywords = _keywords(*others)
    heads = map(aligned, (query, key, value))
    return _flash_attn_fwd(*heads, softcap=softcap or None, return_lse=True, **keywords)


@_forward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, query_bounds: Tensor | None, *_: Any) -> tuple[Tensor, Tensor]:
    output = query.new_empty(*query.shape[:-1], value.shape[-1])
    *batch, length, heads = query.shape[:-1]
    return output, query.new_empty(*batch, heads, length, dtype=torch.float32)


@library.custom_op(
    "veomni_flash_attn::flash_attention_4_backward",
    mutates_args=(),
    schema=(
        f"({_HEADS}, Tensor output, Tensor lse, Tensor upstream, Tensor? upstream_lse, {_SETTINGS}) "
        "-> (Tensor, Tensor, Tensor)"
    ),
)
def _backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    upstream: Tensor,
    upstream_lse: Tensor | None,
    *settings: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    *others, softcap = settings
    heads = (*map(aligned, (query, key, value, output, upstream)), lse)
    dlse = None if upstream_lse is None else aligned(upstream_lse, upstream_lse.element_size())
    return _flash_attn_bwd(*heads, softcap=softcap, dlse=dlse, **_keywords(*others))


@_backward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return empty_like_aligned(query), empty_like_aligned(key), empty_like_aligned(value)


def _keywords(
    query_bounds: Tensor | None,
    key_bounds: Tensor | None,
    longest_query: int,
    longest_key: int,
    scaling: float,
    causal: bool,
    window: int,
) -> dict[str, Any]:
    """:data:`_SETTINGS` without the softcap, under the library's argument names.

    The window is two-sided; a causal call ignores its right side.
    """
    reach = None if window < 0 else window
    keywords = {
        "softmax_scale": scaling,
        "causal": causal,
        "window_size_left": reach,
        "window_size_right": reach,
    }
    if query_bounds is None:
        return keywords
    lengths = {
        "cu_seqlens_q": query_bounds,
        "cu_seqlens_k": key_bounds,
        "max_seqlen_q": longest_query,
        "max_seqlen_k": longest_key,
    }
    return keywords | lengths


_LIBRARY = FlashAttention4()


def standard(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """``query[B, Hq, S, D]``, ``key[B, Hk, L, D]``, ``value[B, Hk, L, Dv]`` to ``[B, S, Hq, Dv]``, and no weights.

    Options and errors: :func:`veomni_flash_attn.by_lengths.attend`. Gradients reach query, key, value, sinks.
    """
    return attend(_LIBRARY, module, query, key, value, attention_mask, **options)
