"""attention by ``npu_fusion_attention``: dense, causal, and over packed sequences of several lengths.

Limits: at most 256 query heads, a multiple of the key heads; heads of at most 768, equally wide in queries and keys.
The operator takes its mask with the masked positions true, and a causal one as a triangle of 2048 x 2048 at any length.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from veomni_core.ops.attention import refuse
from veomni_core.ops.autocast import cast_as_autocast
from veomni_npu.operators import npu

_TRIANGLE = 2048
# The operator's sparse_mode: the whole mask is given, or it is causal, the last positions aligned.
_WHOLE_MASK, _CAUSAL = 1, 3
_ROWS_MAY_BE_MASKED = 2  # its inner_precise: exact also where a whole row of the mask is true
_NOT_COMPUTED = ("softcap", "s_aux")


def standard(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """``softmax(scaling * query @ key.T + mask) @ value``, as ``[B, S, Hq, D]``, and ``None`` for the weights.

    ``query[B, Hq, S, D]``, ``key[B, Hk, L, D]``, ``value[B, Hk, L, D]``; under autocast they take its dtype. A boolean
    mask keeps what is true; another one is added, and takes ``[B, Hq, S, L]`` of memory. Without a mask the attention
    is causal where ``is_causal``, or else the module, says so. ``cu_seq_lens_q`` and ``cu_seq_lens_k`` (int,
    ``[sequences + 1]``, from 0) say where packed sequences begin, and take the mask's place; the operator wants them on
    the host, so handing them over there saves a wait for the device in every layer. Gradients reach query, key and
    value.

    Raises:
        ValueError: a softcap, sinks or a padding mask are asked for; a sliding window that no mask holds; or packed
            sequences with a sliding window, or in a batch.
    """
    refuse("npu_fusion_attention", kwargs)
    query, key, value = map(cast_as_autocast, (query, key, value))
    asked = [name for name in _NOT_COMPUTED if kwargs.get(name) is not None]
    if asked:
        raise ValueError(f"npu_fusion_attention does not compute {' and '.join(asked)}")
    causal = module.is_causal if is_causal is None else is_causal
    options = {"scale": query.shape[-1] ** -0.5 if scaling is None else scaling, "keep_prob": 1.0 - dropout}
    if cu_seq_lens_q is None or cu_seq_lens_k is None:
        if attention_mask is not None and attention_mask.dim() != 4:
            raise ValueError(f"npu_fusion_attention takes a mask of 4 dimensions, not {attention_mask.dim()}")
        if attention_mask is None and sliding_window is not None and key.shape[2] > sliding_window:
            raise ValueError("npu_fusion_attention takes a sliding window in its mask, and there is none")
        return _dense(query, key, value, attention_mask, causal, options), None
    if sliding_window is not None or query.shape[0] != 1:
        raise ValueError("packed sequences are computed in a batch of one and without a sliding window")
    return _packed(query, key, value, cu_seq_lens_q, cu_seq_lens_k, causal, options), None


def _dense(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, options: dict[str, Any]
) -> Tensor:
    if mask is None:
        if causal and query.shape[2] > 1:
            options |= _causal(query.device)
    elif mask.dtype == torch.bool:
        options |= {"atten_mask": ~mask, "sparse_mode": _WHOLE_MASK, "inner_precise": _ROWS_MAY_BE_MASKED}
    else:
        # Scaled here, since the documentation has it both ways whether the operator scales what is added.
        query = query * options["scale"]
        options |= {"pse": mask.to(query.dtype).expand(*query.shape[:3], key.shape[2]), "scale": 1.0}
    return _attend([heads.transpose(1, 2) for heads in (query, key, value)], "BSND", options)


def _packed(
    query: Tensor, key: Tensor, value: Tensor, query_starts: Tensor, key_starts: Tensor, causal: bool, options: Any
) -> Tensor:
    options |= {"actual_seq_qlen": query_starts[1:].tolist(), "actual_seq_kvlen": key_starts[1:].tolist()}
    if causal:
        options |= _causal(query.device)
    return _attend([heads[0].transpose(0, 1) for heads in (query, key, value)], "TND", options).unsqueeze(0)


def _attend(heads: list[Tensor], layout: str, options: dict[str, Any]) -> Tensor:
    """The result for query, key and value of ``[..., heads, D]``."""
    result = npu.npu_fusion_attention(*heads, heads[0].shape[-2], layout, **options)
    return result[0]  # type: ignore[no-any-return]


def _causal(device: torch.device) -> dict[str, Any]:
    return {"atten_mask": _triangle(device), "sparse_mode": _CAUSAL}


@functools.cache
def _triangle(device: torch.device) -> Tensor:
    """True above the diagonal; 4 MiB, kept for the process."""
    with torch.inference_mode(False):  # or training that follows an evaluation could not keep it for backward
        return torch.ones(_TRIANGLE, _TRIANGLE, dtype=torch.bool, device=device).triu(1)
