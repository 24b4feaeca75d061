"""attention by FlashAttention 2 (the package flash-attn), which is traced by ``torch.compile`` as it is."""

from __future__ import annotations

from typing import Any

from flash_attn import flash_attn_func, flash_attn_varlen_func
from torch import Tensor

from veomni_core.sites.attention import MASK_INTERFACE
from veomni_flash_attn.by_lengths import Bounds, Options, attend

_WIDEST = 256


class FlashAttention2:
    """Heads of at most 256, equally wide in queries, keys and values; bfloat16 and float16."""

    name = "flash_attention_2"

    def refuses(self, query: Tensor, value: Tensor, options: Options, packed: bool) -> list[str]:
        problems = ["sinks"] if options.sinks is not None else []
        if options.softcap and options.dropout:
            problems.append("a softcap together with dropout")
        if query.shape[-1] > _WIDEST or query.shape[-1] != value.shape[-1]:
            problems.append(f"heads of {query.shape[-1]} in queries and {value.shape[-1]} in values")
        return problems

    def dense(self, query: Tensor, key: Tensor, value: Tensor, options: Options) -> Tensor:
        return flash_attn_func(query, key, value, **_keywords(options))  # type: ignore[no-any-return]

    def packed(self, query: Tensor, key: Tensor, value: Tensor, bounds: Bounds, options: Options) -> Tensor:
        return flash_attn_varlen_func(  # type: ignore[no-any-return]
            query,
            key,
            value,
            cu_seqlens_q=bounds.queries,
            cu_seqlens_k=bounds.keys,
            max_seqlen_q=bounds.longest_query,
            max_seqlen_k=bounds.longest_key,
            **_keywords(options),
        )


def _keywords(options: Options) -> dict[str, Any]:
    reach = -1 if options.window is None else options.window
    return {
        "dropout_p": options.dropout,
        "softmax_scale": options.scaling,
        "causal": options.causal,
        "window_size": (reach, reach),
        "softcap": options.softcap,
    }


_LIBRARY = FlashAttention2()


def standard(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """``query[B, Hq, S, D]``, ``key[B, Hk, L, D]``, ``value[B, Hk, L, D]`` to ``[B, S, Hq, D]``, and no weights.

    Options, and what is raised: :func:`veomni_flash_attn.by_lengths.attend`.
    """
    return attend(_LIBRARY, module, query, key, value, attention_mask, **options)


setattr(standard, MASK_INTERFACE, "flash_attention_2")
