"""attention on CPUs whose bits don't depend on the batch: prefill, padded, packed and token by token give the same.

The keys that a query sees are taken in blocks of :data:`_KEYS`, counted from the first one that it sees, and always of
as many queries. What a query doesn't see adds zeros, which change no bit. Softmax and sums are in float32.

Shape suffixes: ``B`` batch, ``H`` query heads, ``G`` query heads of one key head, ``K`` key heads, ``S`` queries, ``L``
keys, ``D`` head width; in a tile ``R`` rows, of ``G`` heads and some queries, and ``C`` keys.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, library
from torch.nn import functional as F

from veomni_core.errors import ConfigError
from veomni_core.kernels import first_derivatives_only, product_operands
from veomni_ops.attention import refuse, visible
from veomni_ops.contract import compute_dtype

_QUERIES, _KEYS = 32, 64
_BACKWARD_QUERIES = 128
_WIDTHS = 16  # heads are widened to multiples of it, so that each row begins a vector


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
    """``softmax(scaling * query @ key.T + mask) @ value``, as ``[B, S, Hq, Dv]``, and ``None`` for the weights.

    Gradients reach query, key, value and sinks. Without a mask, causal attention is aligned at the first key, and a
    single query sees all keys.

    Args:
        query, key, value: ``[B, Hq, S, D]``, ``[B, Hk, L, D]``, ``[B, Hk, L, Dv]``.
        attention_mask: ``[B, 1 or Hq, S, L]``, boolean or added. It holds window and boundaries, where it is given.
        s_aux: a score per head ``[Hq]``, whose weight is dropped.

    Raises:
        ConfigError: dropout, a mask of other than 4 dimensions or with a gradient, or sinks per query are given.
    """
    refuse("fixed_order", options, attention_mask)
    masked = attention_mask is not None
    refused = {
        "dropout": dropout > 0,
        "a mask of other than 4 dimensions": masked and attention_mask.dim() != 4,  # type: ignore[union-attr]
        "the gradient of a mask": masked and attention_mask.requires_grad,  # type: ignore[union-attr]
    }
    if any(refused.values()):
        asked = " and ".join(what for what, is_asked in refused.items() if is_asked)
        raise ConfigError(f"fixed_order does not compute {asked}; choose eager or sdpa (attn_implementation)")
    query, key, value = product_operands("fixed_order", query=query, key=key, value=value)
    if attention_mask is None:
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        pairs = query.new_empty(()).expand(query.shape[2], key.shape[2])
        bounds = (cu_seq_lens_q, cu_seq_lens_k)
        attention_mask = visible(pairs, causal, sliding_window, *bounds, from_the_first_key=True)[None, None]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    output: Tensor = _forward(query, key, value, attention_mask, s_aux, scale, softcap)[0]
    return output, None


@library.custom_op("veomni_torch::attention_in_fixed_order", mutates_args=())
def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    s_aux: Tensor | None,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """The output ``[B, S, H, Dv]``, and for backward each row's largest score and its sum beside that ``[2, B, H, S]``.

    One logarithm of both would lose the sum where a mask adds -1e9 to all scores of a row.
    """
    batch, heads, queries, _ = query.shape
    wide = compute_dtype(query)
    width, groups = value.shape[-1], heads // key.shape[1]
    result = torch.zeros(batch, heads, queries, width, dtype=wide)
    sums = torch.zeros(2, batch, heads, queries, dtype=wide)
    for b in range(batch):
        q_KGSD = _widened(query[b].unflatten(0, (-1, groups)).to(wide) * scale)
        k_KLD, v_KLD = _widened(key[b].to(wide)), _widened(value[b].to(wide))
        seen_HSL, added_HSL, kept_HSL = _split(mask[b % mask.shape[0]], wide, s_aux)
        any_SL = seen_HSL.any(0)
        first_S = any_SL.int().argmax(-1).tolist() if any_SL.shape[-1] else [0] * queries
        after_S = (any_SL * torch.arange(1, any_SL.shape[-1] + 1)).amax(-1).tolist() if any_SL.shape[-1] else first_S
        for at in range(0, queries, _QUERIES):
            rows = range(at, min(at + _QUERIES, queries))
            tile_KGSD = _filled(q_KGSD[:, :, at : rows.stop], 2, _QUERIES).flatten(1, 2)
            for start in sorted({first_S[row] for row in rows}):
                own = [row for row in rows if first_S[row] == start]
                state = _start(tile_KGSD, v_KLD.shape[-1], s_aux, groups)
                for left in range(start, max(after_S[row] for row in own), _KEYS):
                    block = slice(left, left + _KEYS)
                    scores = tile_KGSD @ _filled(k_KLD[:, block], 1, _KEYS).mT  # [K, R, C]
                    scores = _capped(scores, softcap)
                    if added_HSL is not None and kept_HSL is not None:
                        scores = scores * _of_tile(kept_HSL[:, at : rows.stop, block], scores, groups)
                        scores = scores + _of_tile(added_HSL[:, at : rows.stop, block], scores, groups)
                    scores = scores.masked_fill(
                        ~_of_tile(seen_HSL[:, at : rows.stop, block], scores, groups), -torch.inf
                    )
                    state = _next(state, scores, _filled(v_KLD[:, block], 1, _KEYS))
                largest, total, sum_KRD = state
                largest, total = torch.where(total == 0, 0.0, largest), torch.where(total == 0, 1.0, total)
                found = (sum_KRD / total, largest, total)
                outputs, *of_rows = (each.unflatten(1, (groups, _QUERIES)).flatten(0, 1) for each in found)
                places = [row - at for row in own]
                result[b, :, own] = outputs[:, places, :width]
                for kept, each in zip(sums, of_rows, strict=True):
                    kept[b, :, own] = each[:, places, 0]
    return result.transpose(1, 2).to(query.dtype).contiguous(), sums


@_forward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    batch, heads, queries, _ = query.shape
    sums = query.new_empty(2, batch, heads, queries, dtype=compute_dtype(query))
    return query.new_empty(batch, queries, heads, value.shape[-1]), sums


@library.custom_op("veomni_torch::attention_in_fixed_order_backward", mutates_args=())
def _backward(
    upstream: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    s_aux: Tensor | None,
    output: Tensor,
    sums: Tensor,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of query, key, value and sinks (without elements if there are none), from whole rows of scores."""
    wide, groups = sums.dtype, query.shape[1] // key.shape[1]
    dquery, dkey, dvalue = (torch.zeros(each.shape, dtype=wide) for each in (query, key, value))
    dsinks = torch.zeros(0 if s_aux is None else query.shape[1], dtype=wide)
    for b in range(query.shape[0]):
        k_KLD, v_KLD = key[b].to(wide), value[b].to(wide)
        seen_HSL, added_HSL, kept_HSL = _split(mask[b % mask.shape[0]], wide, s_aux)
        for at in range(0, query.shape[2], _BACKWARD_QUERIES):
            rows = slice(at, at + _BACKWARD_QUERIES)
            q_KRD = query[b, :, rows].to(wide).unflatten(0, (-1, groups)).flatten(1, 2)
            dy_HSD = upstream[b, rows].to(wide).transpose(0, 1)
            delta_HS = (dy_HSD * output[b, rows].to(wide).transpose(0, 1)).sum(-1)
            dy_KRD = dy_HSD.unflatten(0, (-1, groups)).flatten(1, 2)
            size = dy_HSD.shape[1]
            scores = _capped(plain := q_KRD @ k_KLD.mT * scale, softcap)
            if added_HSL is not None and kept_HSL is not None:
                scores = scores * _of_tile(kept_HSL[:, rows], scores, groups)
                scores = scores + _of_tile(added_HSL[:, rows], scores, groups)
            scores = scores.masked_fill(~_of_tile(seen_HSL[:, rows], scores, groups), -torch.inf)
            largest, total = (each[b, :, rows].reshape(-1, groups * size, 1) for each in sums)
            p_KRL = (scores - largest).exp() / total
            dvalue[b] += p_KRL.mT @ dy_KRD
            ds_KRL = p_KRL * (dy_KRD @ v_KLD.mT - delta_HS.reshape(-1, groups * size, 1))
            if softcap is not None:
                ds_KRL = ds_KRL * (1.0 - torch.tanh(plain / softcap).square())
            ds_KRL = ds_KRL * scale
            dquery[b, :, rows] = (ds_KRL @ k_KLD).unflatten(1, (groups, size)).flatten(0, 1)
            dkey[b] += ds_KRL.mT @ q_KRD
            if s_aux is not None:
                largest, total = sums[:, b, :, rows]
                dsinks -= ((s_aux.to(wide)[:, None] - largest).exp() / total * delta_HS).sum(-1)
    dsinks = query.new_empty(0) if s_aux is None else dsinks.to(s_aux.dtype)
    return dquery.to(query.dtype), dkey.to(key.dtype), dvalue.to(value.dtype), dsinks


@_backward.register_fake
def _(
    upstream: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, s_aux: Tensor | None, *others: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    operands = (query, key, value, query.new_empty(0) if s_aux is None else s_aux)
    return tuple(each.new_empty(each.shape) for each in operands)  # type: ignore[return-value]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale, ctx.softcap = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])


@first_derivatives_only
def _gradients(ctx: Any, upstream: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    *found, dsinks = _backward(upstream, *ctx.saved_tensors, ctx.scale, ctx.softcap)
    return *found, None, dsinks if ctx.needs_input_grad[4] else None, None, None


_forward.register_autograd(_gradients, setup_context=_save)


def _split(mask: Tensor, dtype: torch.dtype, s_aux: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """What is seen, what is added to scores, and by what they are multiplied first, each ``[1 or H, S, L]``.

    The lowest numbers hide a key. A row of nothing else sees all keys, and its scores are lost beside such numbers; not
    beside those of float16. Where there are sinks, it sees these alone.
    """
    if mask.dtype == torch.bool:
        return mask, None, None
    seen = mask > torch.finfo(mask.dtype).min / 2
    lowest = ~seen.any(-1, keepdim=True) & (s_aux is None)
    added = torch.where(lowest & ~mask.isinf(), 0.0, mask).to(dtype)
    lost = lowest & (mask.dtype != torch.float16)
    return seen | (lowest & ~mask.isinf()), added, (~lost).to(dtype).expand(mask.shape)


def _widened(heads: Tensor) -> Tensor:
    return F.pad(heads, (0, -heads.shape[-1] % _WIDTHS))


def _filled(part: Tensor, dim: int, size: int) -> Tensor:
    """``part``, copied, with zeros up to ``size`` along ``dim``."""
    missing = size - part.shape[dim]
    if not missing:
        return part.clone(memory_format=torch.contiguous_format)
    return F.pad(part, (0, 0) * (part.dim() - 1 - dim) + (0, missing)).contiguous()


def _of_tile(part: Tensor, scores: Tensor, groups: int) -> Tensor:
    """A mask's part ``[1 or H, some queries, some keys]`` as scores ``[K, R, C]``; zeros where it has none."""
    rows, keys = scores.shape[1] // groups, scores.shape[2]
    part = F.pad(part, (0, keys - part.shape[2], 0, rows - part.shape[1]))
    return part.expand(scores.shape[0] * groups, -1, -1).reshape(scores.shape)


def _capped(scores: Tensor, softcap: float | None) -> Tensor:
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


_State = tuple[Tensor, Tensor, Tensor]  # the largest score [K, R, 1], the sum of exponentials, and that of values


def _start(tile_KRD: Tensor, width: int, s_aux: Tensor | None, groups: int) -> _State:
    """Before the first key: a sink, if there is one, has been seen."""
    shape = tile_KRD.shape[:2]
    values = tile_KRD.new_zeros(*shape, width)
    if s_aux is None:
        return tile_KRD.new_full((*shape, 1), -torch.inf), tile_KRD.new_zeros(*shape, 1), values
    sinks = s_aux.to(tile_KRD.dtype).view(-1, groups, 1).expand(-1, -1, shape[1] // groups).reshape(*shape, 1)
    return sinks, torch.ones_like(sinks), values


def _next(state: _State, scores: Tensor, v_KCD: Tensor) -> _State:
    largest, total, values = state
    higher = torch.maximum(largest, scores.amax(-1, keepdim=True))
    base = torch.where(higher == -torch.inf, 0.0, higher)
    rescale, p_KRC = (largest - base).exp(), (scores - base).exp()
    return higher, total * rescale + p_KRC.sum(-1, keepdim=True), values * rescale + p_KRC @ v_KCD
