"""attention by ``npu_fusion_attention``: dense, causal and packed (varlen) sequences.

Limits: at most 256 query heads, a multiple of the key heads; heads at most 768 wide, with queries as wide as keys. In
the operator's mask, True means masked. For causal attention of any length it takes a 2048 x 2048 triangle as the mask.
"""

from __future__ import annotations

import functools
from itertools import accumulate, compress
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from veomni_core.errors import ConfigError
from veomni_core.kernels import cast_as_autocast
from veomni_npu.operators import npu
from veomni_ops.attention import refuse

_TRIANGLE = 2048
# The operator's sparse_mode: a whole mask is given; or attention is causal, and the first query is at the first key, or
# the last query at the last key.
_WHOLE_MASK, _FIRST_AT_FIRST, _LAST_AT_LAST = 1, 2, 3
_ROWS_MAY_BE_MASKED = 2  # inner_precise: also exact for rows in which every position is masked
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

    Gradients reach query, key and value. Under autocast these are cast to its dtype.

    Args:
        query: ``[B, Hq, S, D]``.
        key: ``[B, Hk, L, D]``.
        value: ``[B, Hk, L, D]``.
        attention_mask: ``[B, 1 or Hq, S, L]``. A boolean mask is True where attention is allowed. Any other mask is
            added to the scores, and takes the memory of ``[B, Hq, S, L]``.
        is_causal: Whether attention without a mask is causal; by default ``module.is_causal``. The first query is then
            at the first key, and a single query sees all keys.
        cu_seq_lens_q: Boundaries of packed sequences, ``[sequences + 1]`` integers that begin with 0. They replace the
            mask. The operator needs them on the host: pass CPU tensors, or every layer waits for the device.
        cu_seq_lens_k: As ``cu_seq_lens_q``.

    Raises:
        ConfigError: a softcap, sinks or a padding mask are requested; a sliding window comes without a mask; or packed
            sequences come with a sliding window, a batch size other than 1, or the boundaries of queries or keys alone.
    """
    refuse("npu_fusion_attention", kwargs, attention_mask)
    query, key, value = map(cast_as_autocast, (query, key, value))
    asked = [name for name in _NOT_COMPUTED if kwargs.get(name) is not None]
    if asked:
        raise ConfigError(f"npu_fusion_attention does not compute {' and '.join(asked)}; choose eager")
    causal = module.is_causal if is_causal is None else is_causal
    options = {"scale": query.shape[-1] ** -0.5 if scaling is None else scaling, "keep_prob": 1.0 - dropout}
    if (cu_seq_lens_q is None) != (cu_seq_lens_k is None):
        raise ConfigError("npu_fusion_attention needs cu_seq_lens_q and cu_seq_lens_k together; pass both")
    if cu_seq_lens_q is None or cu_seq_lens_k is None:
        if attention_mask is not None and attention_mask.dim() != 4:
            raise ConfigError(f"npu_fusion_attention takes a mask of 4 dimensions, not {attention_mask.dim()}")
        if attention_mask is None and sliding_window is not None and key.shape[2] > sliding_window:
            raise ConfigError("npu_fusion_attention computes a sliding window only by a mask; pass a mask with it")
        return _dense(query, key, value, attention_mask, causal, options), None
    if sliding_window is not None or query.shape[0] != 1:
        raise ConfigError(
            "npu_fusion_attention computes packed sequences only in a batch of one and without a sliding window"
        )
    return _packed(query, key, value, cu_seq_lens_q, cu_seq_lens_k, causal, options), None


def _dense(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, options: dict[str, Any]
) -> Tensor:
    if mask is None:
        if causal and query.shape[2] > 1:
            options |= _causal(query.device, _FIRST_AT_FIRST)
    elif mask.dtype == torch.bool:
        options |= {"atten_mask": ~mask, "sparse_mode": _WHOLE_MASK, "inner_precise": _ROWS_MAY_BE_MASKED}
    else:
        # Scaled here: the documentation contradicts itself on whether the operator scales the added mask too.
        query = query * options["scale"]
        options |= {"pse": mask.to(query.dtype).expand(*query.shape[:3], key.shape[2]), "scale": 1.0}
    # [B, H, S, D] to [B, S, H, D]
    output = _attend([heads.transpose(1, 2) for heads in (query, key, value)], "BSND", options)
    if mask is None or mask.dtype != torch.bool:
        return output
    return output.masked_fill(~mask.any(-1).transpose(1, 2).unsqueeze(-1), 0.0)  # of a query that sees no key


def _packed(
    query: Tensor, key: Tensor, value: Tensor, query_starts: Tensor, key_starts: Tensor, causal: bool, options: Any
) -> Tensor:
    """The operator gets the sequences that have queries and keys. Any other query gives zeros."""
    lengths = [starts.diff().tolist() for starts in (query_starts, key_starts)]  # reads the boundaries on the host
    attends = [bool(queries and keys) for queries, keys in zip(*lengths, strict=True)]
    ends = [[*accumulate(compress(each, attends))] for each in lengths]
    shape, places = (*query.shape[:3], value.shape[3]), None
    if [each[-1:] for each in ends] != [[query.shape[2]], [key.shape[2]]]:
        kept = torch.tensor(attends)
        places, of_keys = (
            kept.repeat_interleave(torch.tensor(each)).nonzero().flatten().to(query.device) for each in lengths
        )
        query, key, value = query[:, :, places], key[:, :, of_keys], value[:, :, of_keys]
    options |= {"actual_seq_qlen": ends[0], "actual_seq_kvlen": ends[1]}
    if causal:
        options |= _causal(query.device, _LAST_AT_LAST)
    # [1, H, T, D] to [T, H, D]
    output = _attend([heads[0].transpose(0, 1) for heads in (query, key, value)], "TND", options).unsqueeze(0)
    if places is None:
        return output
    return output.new_zeros(shape).transpose(1, 2).index_copy(1, places, output)


def _attend(heads: list[Tensor], layout: str, options: dict[str, Any]) -> Tensor:
    """The output for query, key and value, each ``[..., heads, D]``: ``[B, S, H, D]`` or, packed, ``[T, H, D]``.

    The operator takes values at most as wide as queries and keys, so these get columns of zeros.
    """
    query, key, value = heads
    missing = value.shape[-1] - query.shape[-1]
    if missing > 0:
        query, key = (pad(each, (0, missing)) for each in (query, key))
    result = npu.npu_fusion_attention(query, key, value, query.shape[-2], layout, **options)
    return result[0]


def _causal(device: torch.device, aligned: int) -> dict[str, Any]:
    return {"atten_mask": _triangle(device), "sparse_mode": aligned}


@functools.cache
def _triangle(device: torch.device) -> Tensor:
    """The causal mask: True above the diagonal. 4 MiB, cached for the process."""
    # Not an inference tensor, which autograd could not save if training follows an evaluation.
    with torch.inference_mode(False):
        return torch.ones(_TRIANGLE, _TRIANGLE, dtype=torch.bool, device=device).triu(1)
