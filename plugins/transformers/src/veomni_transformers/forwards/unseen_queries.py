"""What eager attention gives for queries that see no key, such as those at padding before a sequence's first token.

transformers' eager attention adds the lowest number of the dtype to the score of every key that a query does not see.
If that is every key, the scores are lost in it: all weights are 1/L, and the result is the mean of all values, those of
hidden keys too. Kernels give zeros.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

import torch
from torch import Tensor

from veomni_core.kernels import cast_as_autocast


def is_dense(mask: Any) -> TypeGuard[Tensor]:
    """Whether ``mask`` is of queries and keys, ``[B, 1 or Hq, S, L]``."""
    return isinstance(mask, Tensor) and mask.dim() == 4


def unseen_queries(mask: Any, query: Tensor, causal: bool, window: int | None) -> Tensor | None:
    """Which queries see no key, as booleans ``[B, 1 or Hq, S]``; ``None`` if all see one, or where that is not known.

    Args:
        mask: ``[B, 1 or Hq, S, L]``, boolean or added; or a padding mask ``[B, positions]``, of which the queries of
            causal attention are the last; ``None``; or of another type, such as a ``BlockMask``.
        query: ``[B, Hq, S, D]``.
        causal: whether a padding mask comes with causal attention.
        window: how many keys a query sees, its own included, beside a padding mask.
    """
    if not isinstance(mask, Tensor) or mask.requires_grad:
        return None
    if mask.dim() == 4:
        if mask.dtype == torch.bool:
            return ~mask.any(dim=-1)
        highest = mask.amax(dim=-1)
        return (highest <= torch.finfo(mask.dtype).min / 2) & highest.isfinite()
    if not causal:
        return ~mask.bool().any(dim=-1)[:, None, None].expand(-1, 1, query.shape[2])
    kept = mask.cumsum(dim=-1)
    if window is not None and window < mask.shape[1]:
        kept = kept - torch.nn.functional.pad(kept[:, :-window], (window, 0))
    return (kept[:, None, -query.shape[2] :] == 0) if query.shape[2] <= mask.shape[1] else None


def nan_where_infinite(output: Tensor, mask: Any, value: Tensor) -> Tensor:
    """``output[B, S, Hq, Dv]``, and NaN for what is NaN in eager attention, where kernels that skip hidden keys don't.

    That is a row to which ``mask`` adds infinities alone, and in the next layer all rows: hidden values count 0 times.
    """
    if not is_dense(mask) or not mask.is_floating_point() or not value.numel():
        return output
    rows = mask.detach().amax(dim=-1).transpose(1, 2).unsqueeze(-1)  # [B, S, 1 or Hq, 1]
    factor = rows * 0 + value.detach().amax(dim=(1, 2, 3)).view(-1, 1, 1, 1) * 0 + 1
    return output * factor.to(output.dtype)  # gradients get it too


def with_means(
    output: Tensor, unseen: Tensor, query: Tensor, key: Tensor, value: Tensor, options: Mapping[str, Any]
) -> Tensor:
    """``output[B, S, Hq, Dv]`` with the mean of all values at ``unseen[B, 1 or Hq, S]``, and with its gradients.

    At equal weights a softmax is linear in small changes of the scores: a key's score moves the output by 1/L of what
    its value is away from the mean. That term has the value 0 here, and brings queries, keys and a ``position_bias``
    the gradients that they have in eager attention, in the memory of ``[B, Hk, D, Dv]``. Neither dropout nor a
    softcap is part of them.
    """
    query, key, value = map(cast_as_autocast, (query, key, value))
    with torch.autocast(query.device.type, enabled=False):
        dtype = torch.float32 if query.dtype == torch.float16 else query.dtype  # sums over keys overflow float16
        query, key, value = (each.to(dtype) for each in (query, key, value))
        mean = value.mean(dim=2, keepdim=True)  # [B, Hk, 1, Dv]
        bias = options.get("position_bias")
        means = mean.repeat_interleave(query.shape[1] // key.shape[1], dim=1)  # [B, Hq, 1, Dv]
        if torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in (query, key, bias)):
            shift = _shift(query, key, (value - mean).detach(), bias, options.get("scaling"))
            means = means + (shift - shift.detach())
    where = unseen.transpose(1, 2).unsqueeze(-1)  # [B, S, 1 or Hq, 1]
    return torch.where(where, means.transpose(1, 2).to(output.dtype), output).contiguous()  # JetMoe views it


def _shift(query: Tensor, key: Tensor, away: Tensor, bias: Tensor | None, scaling: float | None) -> Tensor:
    """``scores @ away / L``, as ``[B, Hq, S, Dv]``, without the scores ``[B, Hq, S, L]``."""
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    each_head = query.unflatten(1, (key.shape[1], -1)) @ (key.transpose(-1, -2) @ away * scaling).unsqueeze(2)
    shift = each_head.flatten(1, 2)
    if bias is not None:
        shift = shift + bias.to(away.dtype) @ away.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    return shift / key.shape[2]
