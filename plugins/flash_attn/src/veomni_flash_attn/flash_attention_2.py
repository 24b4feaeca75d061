"""attention by FlashAttention 2 (the package flash-attn), whose functions ``torch.compile`` can trace."""

from __future__ import annotations

from typing import Any

import torch
from flash_attn import flash_attn_func, flash_attn_varlen_func
from flash_attn.flash_attn_interface import _flash_attn_backward, _flash_attn_forward
from torch import Tensor

from veomni_core.kernels import aligned, first_derivatives_only
from veomni_flash_attn.by_lengths import Bounds, Options, attend, equally_wide, unsupported_heads
from veomni_ops.attention_blocks import Block


class FlashAttention2:
    """Heads of 8 to 256 in multiples of 8; bfloat16 and float16. No sinks: its log-sum-exp has no gradient."""

    name = "flash_attention_2"

    def refuses(self, query: Tensor, value: Tensor, options: Options, packed: bool) -> list[str]:
        problems = ["sinks"] if options.sinks is not None else []
        if options.dropout and options.softcap:
            problems.append("a softcap together with dropout")
        return problems + unsupported_heads(query, value)

    def dense(self, query: Tensor, key: Tensor, value: Tensor, options: Options) -> Tensor:
        output = flash_attn_func(*_readable(query, key, value), **_keywords(options))
        return _FirstDerivatives.apply(output)[..., : value.shape[-1]]

    def packed(self, query: Tensor, key: Tensor, value: Tensor, bounds: Bounds, options: Options) -> Tensor:
        lengths = {
            "cu_seqlens_q": bounds.queries,
            "cu_seqlens_k": bounds.keys,
            "max_seqlen_q": bounds.longest_query,
            "max_seqlen_k": bounds.longest_key,
        }
        output = flash_attn_varlen_func(*_readable(query, key, value), **lengths, **_keywords(options))
        return _FirstDerivatives.apply(output)[..., : value.shape[-1]]


class FlashAttention2Blocks:
    """Blocks by the library's forward and backward: ``flash_attn_func`` gives no log-sum-exp that backward takes."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, block: Block) -> tuple[Tensor, Tensor]:
        output, lse, *_ = _flash_attn_forward(*_readable(query, key, value), 0.0, return_softmax=False, **_of(block))
        return output[..., : value.shape[-1]], lse

    def gradients(
        self, upstream: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, block: Block
    ) -> tuple[Tensor, ...]:
        heads = _readable(upstream, query, key, value, output)
        found = [torch.empty_like(each, memory_format=torch.contiguous_format) for each in heads[1:4]]
        _flash_attn_backward(*heads, lse.contiguous(), *found, 0.0, deterministic=False, rng_state=None, **_of(block))
        return tuple(each[..., : of.shape[-1]] for each, of in zip(found, (query, key, value), strict=True))


def _of(block: Block) -> dict[str, Any]:
    return {
        "softmax_scale": block.scaling,
        "causal": block.causal,
        "window_size_left": -1 if block.left is None else block.left,
        "window_size_right": 0 if block.causal else -1,
        "softcap": block.softcap,
        "alibi_slopes": None,
    }


def _readable(*heads: Tensor) -> tuple[Tensor, ...]:
    """Heads padded to one width, and aligned to 16 bytes; the library itself only checks the last stride."""
    return tuple(aligned(each, expanded=True) for each in equally_wide(*heads))


def _keywords(options: Options) -> dict[str, Any]:
    reach = -1 if options.window is None else options.window
    return {
        "dropout_p": options.dropout,
        "softmax_scale": options.scaling,
        "causal": options.causal,
        "window_size": (reach, reach),
        "softcap": options.softcap,
    }


class _FirstDerivatives(torch.autograd.Function):
    """The identity; its backward aligns the incoming gradient for the library, and raises for second derivatives.

    Autograd can't differentiate the library's own backward (2.8.3).
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor) -> Tensor:
        return output.view_as(output)

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, upstream: Tensor) -> Tensor:
        return aligned(upstream)


_LIBRARY = FlashAttention2()


def standard(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """``query[B, Hq, S, D]``, ``key[B, Hk, L, D]``, ``value[B, Hk, L, Dv]`` to ``[B, S, Hq, Dv]``, and no weights.

    Options and errors: :func:`veomni_flash_attn.by_lengths.attend`.
    """
    return attend(_LIBRARY, module, query, key, value, attention_mask, **options)


standard.blocks = FlashAttention2Blocks()  # type: ignore[attr-defined]  # what ring attention computes by
