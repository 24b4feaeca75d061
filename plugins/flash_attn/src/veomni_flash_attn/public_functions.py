"""The two public functions that FlashAttention 2 and 3 both have, with the same arguments but for dropout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from veomni_flash_attn.by_lengths import Bounds, Options, unsupported_heads

Result = Tensor | tuple[Tensor, ...]


@dataclass(frozen=True)
class PublicFunctions:
    """Heads of 8 to 256 in multiples of 8, equally wide in queries, keys and values; bfloat16 and float16."""

    name: str
    of_full_sequences: Callable[..., Result]
    of_packed_sequences: Callable[..., Result]
    drops_out: bool

    def refuses(self, query: Tensor, value: Tensor, options: Options, packed: bool) -> list[str]:
        problems = ["sinks"] if options.sinks is not None else []
        if options.dropout and not self.drops_out:
            problems.append("dropout")
        if options.dropout and options.softcap:
            problems.append("a softcap together with dropout")
        if query.shape[-1] != value.shape[-1]:
            problems.append(f"heads of {query.shape[-1]} in queries and another width, {value.shape[-1]}, in values")
        return problems + unsupported_heads(query, value)

    def dense(self, query: Tensor, key: Tensor, value: Tensor, options: Options) -> Tensor:
        return _output(self.of_full_sequences(query, key, value, **self._keywords(options)))

    def packed(self, query: Tensor, key: Tensor, value: Tensor, bounds: Bounds, options: Options) -> Tensor:
        lengths = {
            "cu_seqlens_q": bounds.queries,
            "cu_seqlens_k": bounds.keys,
            "max_seqlen_q": bounds.longest_query,
            "max_seqlen_k": bounds.longest_key,
        }
        return _output(self.of_packed_sequences(query, key, value, **lengths, **self._keywords(options)))

    def _keywords(self, options: Options) -> dict[str, Any]:
        reach = -1 if options.window is None else options.window
        dropout = {"dropout_p": options.dropout} if self.drops_out else {}
        return dropout | {
            "softmax_scale": options.scaling,
            "causal": options.causal,
            "window_size": (reach, reach),
            "softcap": options.softcap,
        }


def _output(result: Result) -> Tensor:
    """The first builds of FlashAttention 3, versioned as later ones are, give the log-sum-exp with the output."""
    return result if isinstance(result, Tensor) else result[0]
