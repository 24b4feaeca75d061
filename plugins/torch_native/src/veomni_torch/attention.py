"""attention by ``torch.nn.functional.scaled_dot_product_attention``, as transformers calls it.

transformers' function silently ignores arguments that it doesn't implement; this kernel raises for them.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from veomni_core.errors import ConfigError
from veomni_core.kernels import ALIGNMENT, aligned, autocast_off, begins_aligned, cast_as_autocast
from veomni_ops.attention import refuse
from veomni_ops.attention_blocks import TORCH

_MOVES_16_BYTES = ("cuda",)  # device types whose kernels load 16 bytes at once without checking alignment
_MOST_PAIRS = 2**32  # above it a fused kernel computes a mask row's offset in 32 bits, and wraps (pytorch issue 187227)
_TILE = 128  # keys that cuDNN's backward reads at once
_VERY_LOW = -1e3  # beside it float32 holds the logarithm of a sum to 3e-5, which is the share that weights are off by
# Contains position_bias in the versions of transformers whose T5 passes it.
_COMPUTED = inspect.signature(sdpa_attention_forward).parameters


def sdpa(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """``softmax(scaling * query @ key.T + mask) @ value``, as ``[B, S, Hq, Dv]``, and ``None`` for the weights.

    Gradients reach query, key, value and position_bias. Without a mask, causal attention is aligned at the first key,
    and a single query sees all keys.

    Args:
        query: ``[B, Hq, S, D]``.
        key: ``[B, Hk, L, D]``.
        value: ``[B, Hk, L, Dv]``.
        attention_mask: ``[B, 1 or Hq, S, L]``, boolean or additive. A sliding window, and the separation of packed
            sequences, must be part of it.
        options: Among others ``position_bias[1 or B, Hq, S, L]``.

    Raises:
        PackedSequencesError: packed sequences come without a mask.
        ConfigError: a softcap, sinks or a padding mask ``[B, L]`` is requested; a window comes without a mask; an
            option chooses keys by sparse attention, or sinks per query; or, on a GPU, a mask covers more than 2**32
            pairs of positions.
    """
    masked = attention_mask is not None
    refused = {
        "a softcap": softcap is not None,
        "sinks": s_aux is not None,
        "a mask of other than 4 dimensions": masked and attention_mask.dim() != 4,  # type: ignore[union-attr]
        "a sliding window without a mask": sliding_window is not None and not masked and key.shape[2] > sliding_window,
    }
    refuse("sdpa", {name: given for name, given in options.items() if name not in _COMPUTED}, attention_mask)
    if any(refused.values()):
        asked = " and ".join(what for what, is_asked in refused.items() if is_asked)
        raise ConfigError(f"sdpa does not compute {asked}; choose flash_attention_2, 3 or 4, or flex_attention")
    causal = getattr(module, "is_causal", True) if options.get("is_causal") is None else bool(options["is_causal"])
    bias = options.pop("position_bias", None)
    if bias is not None:
        if not masked and causal and query.shape[2] > 1:
            attention_mask = _seen_from_the_first_key(query, key)
        attention_mask = _with_bias(bias, attention_mask, query.dtype)
    if query.device.type in _MOVES_16_BYTES:
        return _on_a_gpu(module, query, key, value, attention_mask, **options), None
    on_cpu = query.device.type == "cpu"
    if on_cpu:
        query, key, value = (_rows_apart(each) for each in (query, key, value))
    output = _attended(module, query, key, value, attention_mask, **options)
    if on_cpu:
        output = output + _zeros_or_nan(query, key).to(output.dtype)
    return output, None


sdpa.blocks = TORCH  # type: ignore[attr-defined]  # what ring attention computes by


def _rows_apart(heads: Tensor) -> Tensor:
    """``heads``, or a copy if the stride of rows is less than a row, as of windows over a signal.

    torch's CPU kernel (2.13) reads beyond such rows, even if there is one row only.
    """
    if heads.stride(-1) == 1 and heads.stride(-2) < heads.shape[-1]:
        return heads.clone(memory_format=torch.contiguous_format)
    return heads


def _seen_from_the_first_key(query: Tensor, key: Tensor) -> Tensor:
    """The causal mask ``[B, 1, S, L]`` of several queries, as torch's ``is_causal`` means it."""
    queries, keys = query.shape[2], key.shape[2]
    seen = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril()
    return seen.expand(query.shape[0], 1, queries, keys)


def _with_bias(bias: Tensor, mask: Tensor | None, dtype: torch.dtype) -> Tensor:
    """An added mask of both. As transformers does, it gives the lowest number to what no query sees."""
    if mask is None:
        return bias
    return bias + mask if mask.is_floating_point() else torch.where(mask, bias, torch.finfo(dtype).min)


def _on_a_gpu(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> Tensor:
    """Call transformers' function with operands aligned for torch's kernels; align the incoming gradient too.

    Under autocast the heads take its dtype here, so that the mask is made for that dtype: torch's own cast would turn
    the lowest float32 into infinity.
    """
    query, key, value = (_readable(cast_as_autocast(each)) for each in (query, key, value))
    mask = attention_mask
    if mask is not None:
        if query.shape[2] * key.shape[2] > _MOST_PAIRS:
            raise ConfigError(
                f"sdpa with a mask takes at most 2**32 pairs of positions, this call has {query.shape[2]} queries and "
                f"{key.shape[2]} keys; choose flash_attention_2, 3 or 4, or flex_attention"
            )
        mask = _readable_mask(mask, query.dtype)
    sees = None
    if mask is not None and query.element_size() == 2:  # what cuDNN computes
        key, value, mask = _in_whole_tiles(key, value, mask)
        mask, sees = _with_rows_that_see(mask)
    output = _attended(module, query, key, value, mask, **options)
    if output.requires_grad and not torch.compiler.is_compiling():
        # torch (2.11) keeps cuDNN's plan by the inputs' layouts, and it reads each gradient by the first one's layout.
        output.register_hook(lambda gradient: _readable(gradient.contiguous()))
    return output if sees is None else torch.where(sees, output, 0.0)


def _in_whole_tiles(key: Tensor, value: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """All three, with hidden keys behind them where half a tile is left over, but in exported graphs.

    There cuDNN, which torch takes on Hopper from 2.11 on, gave NaN as gradients of queries whose weights' sum has a
    logarithm below -88, if there is a mask (pytorch issue 196678). Without gradients too, so that bits are the same.
    """
    if torch.compiler.is_exporting() or key.shape[2] % _TILE != _TILE // 2:
        return key, value, mask
    mask = mask.expand(-1, -1, -1, key.shape[2])
    key, value = (F.pad(each, (0, 0, 0, _TILE // 2)) for each in (key, value))
    return key, value, F.pad(mask, (0, _TILE // 2), value=float("-inf") if mask.is_floating_point() else False)


def _with_rows_that_see(mask: Tensor) -> tuple[Tensor, Tensor | None]:
    """A boolean mask that shows all keys to queries that would see none; and ``[B, S, 1 or Hq, 1]``, which do see some.

    cuDNN gave queries without keys numbers, and gradients through them (H200, 2.11): zeros are to replace these.
    """
    if mask.is_floating_point():
        return mask, None
    sees = mask.any(dim=-1, keepdim=True)
    return mask | ~sees, sees.transpose(1, 2).contiguous()  # since `where` lays its result out by its condition


def _attended(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any) -> Tensor:
    """transformers' function, or torch's unfused code for an added mask that fused kernels compute wrongly.

    In 16 bits they take a position bias' gradient from the rounded output: on an H100 (2.11) single elements were off
    by a tenth, where the unfused code is off by 4e-3. Where the mask alone requires a gradient, those of GPUs (2.11)
    save nothing for backward, and raise. Where it gives numbers such as -1e9 or the lowest to all keys of a query, the
    mean of the values is wanted: those of GPUs (2.11) were off by half, and that of CPUs (2.13) gave gradients as many
    times too large as there are keys. They keep the logarithm of a sum, in which the number of keys is lost.
    """
    if mask is None or not mask.is_floating_point() or not mask.numel():
        return sdpa_attention_forward(module, query, key, value, mask, **options)[0]  # type: ignore[no-any-return]
    alone = not any(each.requires_grad for each in (query, key, value))
    learned = mask.requires_grad and (alone or cast_as_autocast(query).element_size() < 4)
    if not learned and not _may_hide_all_keys(mask):
        return sdpa_attention_forward(module, query, key, value, mask, **options)[0]  # type: ignore[no-any-return]
    query, key, value = (cast_as_autocast(each) for each in (query, key, value))
    mask = _readable_mask(mask, query.dtype)
    # Not by `sdpa_kernel`, which switches the kernels of all threads. Under autocast the softmax inside would give
    # float32 for operands of 16 bits, and backward would raise.
    with autocast_off(query.device.type):
        output, _ = torch.ops.aten._scaled_dot_product_attention_math(
            query, key, value, mask, options.get("dropout", 0.0), scale=options.get("scaling"), enable_gqa=True
        )
    return output.transpose(1, 2).contiguous()


def _may_hide_all_keys(mask: Tensor) -> bool:
    """Whether a row of an added mask has very low numbers alone. A graph that is recorded can't depend on it."""
    recorded = torch.compiler.is_compiling() or (mask.is_cuda and torch.cuda.is_current_stream_capturing())
    if recorded or mask.is_meta:
        return True
    return bool((mask.detach().amax(dim=-1) <= _VERY_LOW).any())


def _readable(heads: Tensor) -> Tensor:
    """``heads``, or an aligned copy. Heads of odd widths stay as they are: torch pads them, which copies them too.

    Expanded heads (a stride of zero) are copied: a fused kernel gave wrong results for them (pytorch issue 191937).
    """
    return heads if heads.shape[-1] * heads.element_size() % ALIGNMENT else aligned(heads)


def _readable_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """``mask`` in ``dtype``, copied if its address is not aligned. torch itself pads rows and handles boolean masks.

    The cast is needed because torch's fused kernels (2.11) accept a float32 mask with bfloat16 queries, but read its
    memory as bfloat16. Finite values are clamped to the dtype's range: the lowest float32 means "masked", and must stay
    finite, so that a row in which everything is masked gives a mean and not NaN.
    """
    if not mask.is_floating_point():
        return mask
    if mask.dtype != dtype:
        finite = torch.finfo(dtype)
        return torch.where(mask.isinf(), mask, mask.clamp(finite.min, finite.max)).to(dtype)
    return mask if begins_aligned(mask) else mask.clone()


def _zeros_or_nan(query: Tensor, key: Tensor) -> Tensor:
    """``[B, S, Hq, 1]``: NaN where the query, or any key of its sequence, is not finite; 0 elsewhere.

    torch's CPU kernel (2.13) returns zeros for a NaN query and finite numbers for an infinite key. Without this term a
    diverged model would look healthy. It has no gradient: a key's would be the sum of all incoming ones, which is
    infinite in float16 from 65,536 ones on, times 0.
    """
    queries = (query.detach() * 0.0).sum(dim=-1, keepdim=True).transpose(1, 2)
    return queries + (key.detach() * 0.0).sum(dim=(1, 2, 3)).view(-1, 1, 1, 1)
