"""attention in Triton whose bits don't depend on the batch: prefill, padded, packed and token by token give the same.

A mask is first read once, for the keys from and to which each query sees some. Where it hides none of those and adds
nothing, as causal, padded, packed and windowed ones do, no other kernel reads it. Forward saves its inputs, the output,
a number for each row, and these ranges. Nothing is added by atomics, and nothing is read on the host.

Shape suffixes: ``B`` batch, ``H`` heads, ``K`` key heads, ``S`` queries, ``L`` keys, ``D`` and ``V`` widths.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from veomni_core.errors import ConfigError
from veomni_core.kernels import first_derivatives_only, product_operands, without_autocast
from veomni_ops.attention import refuse
from veomni_triton.attention import operators

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MASKS = (torch.bool, *_DTYPES)
_WIDEST = 256


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """``softmax(scaling * query @ key.T + mask) @ value``, as ``[B, S, H, V]``, and ``None`` for the weights.

    Gradients reach query, key, value and sinks. Without a mask, causal attention is aligned at the first key, and a
    single query sees all keys.

    Args:
        query, key, value: ``[B, H, S, D]``, ``[B, K, L, D]``, ``[B, K, L, V]``.
        attention_mask: ``[1 or B, 1 or H, S, L]``, boolean or added. It holds window and boundaries, where it is given.
        s_aux: a score per head ``[H]``, whose weight is dropped.

    Raises:
        ConfigError: dropout, heads above 256, a mask of other than 4 dimensions, of integers or float64, or with a
            gradient, or sinks per query are given.
        TypeError: query, key and value differ in dtype without autocast, or are of none of float32, bfloat16 and
            float16.
    """
    refuse("triton", options, attention_mask)
    mask = attention_mask
    refused = {
        "dropout": dropout > 0,
        f"heads above {_WIDEST}": max(query.shape[-1], value.shape[-1]) > _WIDEST,
        "a mask of other than 4 dimensions": mask is not None and mask.dim() != 4,
        "a mask of integers or float64": mask is not None and mask.dtype not in _MASKS,
        "the gradient of a mask": mask is not None and mask.requires_grad,
    }
    if any(refused.values()):
        asked = " and ".join(what for what, is_asked in refused.items() if is_asked)
        raise ConfigError(f"triton does not compute {asked}; choose eager or sdpa (attn_implementation)")
    query, key, value = product_operands("triton", dtypes=_DTYPES, query=query, key=key, value=value)
    mask = mask if mask is None else mask[..., : key.shape[2]].expand(-1, -1, query.shape[2], key.shape[2])
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    how = (scale, softcap or 0.0, causal, sliding_window, cu_seq_lens_q, cu_seq_lens_k)
    sinks = None if s_aux is None else s_aux.contiguous()  # kernels read it without a stride
    return _Attention.apply(query, key, value, mask, sinks, *how)[0], None


class _Attention(Function):
    @staticmethod
    @without_autocast
    def forward(ctx: Any, *call: Any) -> tuple[Tensor, ...]:
        output, *saved = operators.attention_forward(*call)
        ctx.save_for_backward(output, *saved, *call[:5])
        ctx.settings = call[5:7]
        ctx.mark_non_differentiable(*saved)
        return output, *saved

    @staticmethod
    @first_derivatives_only
    @without_autocast
    def backward(ctx: Any, doutput: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        *found, dsinks = operators.attention_gradients(doutput, *ctx.saved_tensors, *ctx.settings)
        wanted = zip((*found, None, dsinks), ctx.needs_input_grad, strict=False)
        return *(x if needed else None for x, needed in wanted), *(None,) * 6
