"""attention by FlashAttention 3 (the package flash-attn-3), on SM90.

``torch.compile`` can't trace the package (3.0.0b1): its operators have no fake implementations, and their schemas
return tensors that they mutate. So this file wraps its two operators, forward and backward, in custom operators that
``torch.compile`` accepts. Inside them, operands that TMA can't read (it needs 16-byte alignment) are copied.
"""

from __future__ import annotations

from typing import Any

import flash_attn_interface  # noqa: F401  registers torch.ops.flash_attn_3
import torch
from torch import Tensor, library

from veomni_core.kernels import aligned, first_derivatives_only
from veomni_flash_attn.by_lengths import Bounds, Options, attend, equally_wide, unsupported_heads
from veomni_ops.attention_blocks import Block


class FlashAttention3:
    """Heads of 8 to 256 in multiples of 8; bfloat16 and float16. No sinks: its log-sum-exp has no gradient."""

    name = "flash_attention_3"

    def refuses(self, query: Tensor, value: Tensor, options: Options, packed: bool) -> list[str]:
        problems = ["sinks"] if options.sinks is not None else []
        if options.dropout:
            problems.append("dropout")
        return problems + unsupported_heads(query, value)

    def dense(self, query: Tensor, key: Tensor, value: Tensor, options: Options) -> Tensor:
        return _attend(query, key, value, (None, None, None, None), options)

    def packed(self, query: Tensor, key: Tensor, value: Tensor, bounds: Bounds, options: Options) -> Tensor:
        lengths = (bounds.queries, bounds.keys, bounds.longest_query, bounds.longest_key)
        return _attend(query, key, value, lengths, options)


class FlashAttention3Blocks:
    """Blocks by the library's two operators."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, block: Block) -> tuple[Tensor, Tensor]:
        heads = map(aligned, equally_wide(query, key, value))
        output, lse, *_ = torch.ops.flash_attn_3.fwd(*heads, num_splits=1, **_of(block))
        return output[..., : value.shape[-1]], lse

    def gradients(
        self, upstream: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, block: Block
    ) -> tuple[Tensor, ...]:
        heads = [aligned(each) for each in equally_wide(upstream, query, key, value, output)]
        found = _unfilled_gradients(*heads[1:4])
        torch.ops.flash_attn_3.bwd(*heads, lse.contiguous(), *found, **_of(block))
        return tuple(each[..., : of.shape[-1]] for each, of in zip(found, (query, key, value), strict=True))


def _of(block: Block) -> dict[str, Any]:
    sides = {"window_size_left": -1 if block.left is None else block.left}
    sides["window_size_right"] = 0 if block.causal else -1
    return {**_keywords(None, None, None, None, block.scaling, block.causal, -1, block.softcap), **sides}


def _attend(query: Tensor, key: Tensor, value: Tensor, lengths: tuple[Any, ...], options: Options) -> Tensor:
    window = -1 if options.window is None else options.window
    numbers = (options.scaling, options.causal, window, options.softcap)
    output, _ = _forward(*equally_wide(query, key, value), *lengths, *numbers)
    return output[..., : value.shape[-1]]


_HEADS = "Tensor query, Tensor key, Tensor value"
_SETTINGS = (
    "Tensor? query_bounds, Tensor? key_bounds, SymInt? longest_query, SymInt? longest_key, "
    "float scaling, bool causal, SymInt window, float softcap"
)


@library.custom_op(
    "veomni_flash_attn::flash_attention_3",
    mutates_args=(),
    schema=f"({_HEADS}, {_SETTINGS}) -> (Tensor output, Tensor lse)",
)
def _forward(query: Tensor, key: Tensor, value: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
    heads = map(aligned, (query, key, value))
    output, lse, *_ = torch.ops.flash_attn_3.fwd(*heads, num_splits=1, **_keywords(*settings))
    return output, lse


@_forward.register_fake
def _(query: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    *batch, length, heads, _ = query.shape
    return query.new_empty(query.shape), query.new_empty(*batch, heads, length, dtype=torch.float32)


@library.custom_op(
    "veomni_flash_attn::flash_attention_3_backward",
    mutates_args=(),
    schema=f"({_HEADS}, Tensor output, Tensor lse, Tensor upstream, {_SETTINGS}) -> (Tensor, Tensor, Tensor)",
)
def _backward(
    query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, upstream: Tensor, *settings: Any
) -> tuple[Tensor, Tensor, Tensor]:
    gradients = _unfilled_gradients(query, key, value)
    operator = torch.ops.flash_attn_3.bwd
    heads = map(aligned, (upstream, query, key, value, output))
    operator(*heads, lse, *gradients, **_keywords(*settings))
    return gradients


@_backward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _unfilled_gradients(query, key, value)


def _keywords(
    query_bounds: Tensor | None,
    key_bounds: Tensor | None,
    longest_query: int | None,
    longest_key: int | None,
    scaling: float,
    causal: bool,
    window: int,
    softcap: float,
) -> dict[str, Any]:
    """:data:`_SETTINGS` under the library's argument names. The window is two-sided, unless the call is causal."""
    return {
        "cu_seqlens_q": query_bounds,
        "cu_seqlens_k": key_bounds,
        "max_seqlen_q": longest_query,
        "max_seqlen_k": longest_key,
        "softmax_scale": scaling,
        "is_causal": causal,
        "window_size_left": window,
        "window_size_right": window,
        "softcap": softcap,
    }


def _unfilled_gradients(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)  # otherwise autograd allocates zeros as the log-sum-exp's gradient
    query, key, value, query_bounds, key_bounds, *ctx.numbers = inputs
    ctx.save_for_backward(query, key, value, *output, query_bounds, key_bounds)


@first_derivatives_only
def _gradients(ctx: Any, upstream: Tensor, _of_lse: Tensor) -> tuple[Tensor | None, ...]:
    *saved, query_bounds, key_bounds = ctx.saved_tensors
    gradients = _backward(*saved, upstream, query_bounds, key_bounds, *ctx.numbers)
    return *gradients, *(None,) * (2 + len(ctx.numbers))


_forward.register_autograd(_gradients, setup_context=_save)

_LIBRARY = FlashAttention3()


def standard(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """``query[B, Hq, S, D]``, ``key[B, Hk, L, D]``, ``value[B, Hk, L, Dv]`` to ``[B, S, Hq, Dv]``, and no weights.

    Options and errors: :func:`veomni_flash_attn.by_lengths.attend`.
    """
    return attend(_LIBRARY, module, query, key, value, attention_mask, **options)


standard.blocks = FlashAttention3Blocks()  # type: ignore[attr-defined]  # what ring attention computes by
