"""attention by ``torch.nn.functional.scaled_dot_product_attention``, as transformers calls it.

transformers' function passes over what it doesn't compute; here that is an error.
"""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from veomni_core.ops.attention import refuse
from veomni_core.ops.memory_layout import ALIGNMENT, aligned, begins_aligned

_MOVES_16_BYTES = ("cuda",)  # device types whose kernels load so, and don't look at addresses or rows first
_COMPUTED = inspect.signature(sdpa_attention_forward).parameters  # in the versions whose T5 calls it, position_bias too


def sdpa(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """``softmax(scaling * query @ key.T + mask) @ value``, as ``[B, S, Hq, Dv]``, and ``None`` for the weights.

    ``query[B, Hq, S, D]``, ``key[B, Hk, L, D]``, ``value[B, Hk, L, Dv]``, and a mask ``[B, 1 or Hq, S, L]``, boolean or
    added, which also holds a sliding window and keeps packed sequences apart; and ``position_bias[1 or B, Hq, S, L]``.
    Gradients reach query, key, value and the bias.

    Raises:
        ValueError: a softcap, sinks or a padding mask are asked for, or a window or packing that no mask holds; or keys
            that sparse attention chose, or sinks of one query each.
    """
    masked = attention_mask is not None
    refused = {
        "a softcap": softcap is not None,
        "sinks": s_aux is not None,
        "a mask of two dimensions": masked and attention_mask.dim() != 4,  # type: ignore[union-attr]
        "a sliding window without a mask": sliding_window is not None and not masked and key.shape[2] > sliding_window,
        "packed sequences without a mask": cu_seq_lens_q is not None and not masked,
    }
    refuse("sdpa", {name: given for name, given in options.items() if name not in _COMPUTED})
    if any(refused.values()):
        asked = " and ".join(what for what, is_asked in refused.items() if is_asked)
        raise ValueError(f"sdpa does not compute {asked}; choose flash_attention_2, 3 or 4, or flex_attention")
    if not masked:
        attention_mask = _mask_of_last_queries(module, query, key, options.get("is_causal"))
    if query.device.type in _MOVES_16_BYTES:
        return _on_a_gpu(module, query, key, value, attention_mask, **options), None
    output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    if query.device.type == "cpu":
        output = output + _zeros_or_nan(query, key).to(output.dtype)
    return output, None


def _mask_of_last_queries(module: Any, query: Tensor, key: Tensor, is_causal: bool | None) -> Tensor | None:
    """What fewer causal queries than keys see: torch's own ``is_causal`` lets the first see the first key alone."""
    queries, keys = query.shape[2], key.shape[2]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if not causal or queries in (1, keys):
        return None
    seen = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries)
    return seen.expand(query.shape[0], 1, queries, keys)


def _on_a_gpu(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    position_bias: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """The call with all of its tensors, and later the incoming gradient, where torch's kernels can read them."""
    if position_bias is not None:
        options["position_bias"] = _readable_mask(position_bias, query.dtype)
    query, key, value = map(_readable, (query, key, value))
    mask = None if attention_mask is None else _readable_mask(attention_mask, query.dtype)
    with _backends(query, key, value, mask, options.get("position_bias")):
        output, _ = sdpa_attention_forward(module, query, key, value, mask, **options)
    if output.requires_grad and not torch.compiler.is_compiling():
        output.register_hook(_readable)
    return output


def _backends(query: Tensor, key: Tensor, value: Tensor, *added: Tensor | None) -> AbstractContextManager[None]:
    """All, but for a bias that alone wants a gradient: torch's fused ones (2.11) keep nothing for that and raise."""
    wants = [each is not None and each.requires_grad for each in added]
    if any(wants) and not any(each.requires_grad for each in (query, key, value)):
        return sdpa_kernel(SDPBackend.MATH)
    return nullcontext()


def _readable(heads: Tensor) -> Tensor:
    """``heads``, or a copy of them; torch pads those of odd widths itself, which copies them too."""
    return heads if heads.shape[-1] * heads.element_size() % ALIGNMENT else aligned(heads, expanded=True)


def _readable_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """``mask`` in ``dtype``, or a copy where its address is wrong; torch pads rows, and takes boolean ones, itself.

    Its fused kernels (2.11) take a float32 mask beside bfloat16 queries and read it as bfloat16. The lowest float32,
    which stands for what no query sees, stays finite, so that a row of nothing else is a mean and not NaN.
    """
    if not mask.is_floating_point():
        return mask
    if mask.dtype != dtype:
        finite = torch.finfo(dtype)
        return torch.where(mask.isinf(), mask, mask.clamp(finite.min, finite.max)).to(dtype)
    return mask if begins_aligned(mask) else mask.clone()


def _zeros_or_nan(query: Tensor, key: Tensor) -> Tensor:
    """``[B, S, Hq, 1]``: NaN where a query, or a key of its sequence, is not finite.

    torch's CPU kernel (2.13) gives zeros for a query of NaN, and finite numbers for an infinite key: without this a
    step that is broken would pass for a good one.
    """
    queries = (query * 0.0).sum(dim=-1, keepdim=True).transpose(1, 2)
    return queries + (key * 0.0).sum(dim=(1, 2, 3)).view(-1, 1, 1, 1)
