"""A bound kernel in the place of eager attention: it also gives what is eager attention's alone, and not the op's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, wraps
from typing import Any

import torch
from torch import Tensor

from veomni_core.changes.change import Change, ClassChange
from veomni_core.errors import ConfigError
from veomni_ops.attention import visible
from veomni_transformers.forwards.unseen_queries import is_dense, nan_where_infinite, unseen_queries, with_means
from veomni_transformers.proving.functions import current_forward, global_functions

try:
    from transformers.utils.output_capturing import _active_collector as _collector
except ImportError:  # transformers before 5.3
    _collector = None  # type: ignore[assignment]

Function = Callable[..., Any]
EAGER_FUNCTION = "eager_attention_forward"  # how the modeling files' eager functions are called, or end


@lru_cache(maxsize=64)
def like_eager(kernel: Function, from_the_first_key: bool, boolean_masks: bool = False) -> Function:
    """``kernel`` for a model that was loaded with eager attention: the same function for the same arguments.

    Queries that see no key give a mean of values (:mod:`veomni_transformers.forwards.unseen_queries`). A call with
    ``output_attentions=True`` runs the module's own eager function, which gives the weights.

    Args:
        kernel: the kernel.
        from_the_first_key: where causal attention is aligned without a mask, as :mod:`veomni_ops.attention` says.
        boolean_masks: whether the masks that transformers builds for it are boolean. Else they are the caller's.
    """

    @wraps(kernel)
    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any) -> Any:
        if is_dense(attention_mask) and _says_not_causal(attention_mask, by_lengths=not from_the_first_key):
            attention_mask = attention_mask[:, 0, 0] if any(attention_mask.stride()) else None
            options["is_causal"] = False
        elif is_dense(attention_mask) and not (boolean_masks and attention_mask.dtype == torch.bool):
            attention_mask = _as_numbers(attention_mask, query.dtype)
        if options.get("output_attentions") or _collected():
            mask = _added(attention_mask, module, query, key, options, from_the_first_key)
            return _own_function(module)(module, query, key, value, mask, **options)
        output, weights = kernel(module, query, key, value, attention_mask, **options)
        sinks = options.get("s_aux") is not None or options.get("sinks") is not None  # they get all weight then: zeros
        if attention_mask is None or sinks:
            return output, weights
        unseen = unseen_queries(attention_mask, query, _is_causal(module, options), options.get("sliding_window"))
        output = output if unseen is None else with_means(output, unseen, query, key, value, options)
        return nan_where_infinite(output, attention_mask, value), weights

    return attend


def refusing_boolean_masks(model: Any) -> Iterator[Change]:
    """The change by which ``model`` refuses its caller's boolean masks, which eager attention adds as numbers.

    A kernel can't tell them from those that transformers builds for it. ``generate`` hands such ones in itself, with a
    static cache: there masks stay as they are.
    """
    call = type(model).__call__

    @wraps(call)
    def refusing(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not getattr(kwargs.get("past_key_values"), "is_compileable", False):
            _refuse_boolean({"attention_mask": args[1] if len(args) > 1 else None, **kwargs})
        return call(self, *args, **kwargs)

    yield ClassChange(model, "__call__", refusing)


def _refuse_boolean(given: Mapping[str, Any]) -> None:
    for name in ("attention_mask", "decoder_attention_mask", "encoder_attention_mask"):
        masks = given[name] if isinstance(given.get(name), Mapping) else {"": given.get(name)}
        if any(is_dense(mask) and mask.dtype == torch.bool for mask in masks.values()):
            raise ConfigError(
                f"{name} is boolean with 4 dimensions, and this model was loaded with eager attention, which adds True "
                "as 1 and hides no key. Pass numbers to add (0 where a query sees a key, torch.finfo(dtype).min where "
                "it doesn't), or load it with attn_implementation='sdpa', for which True is what a query sees"
            )


def _says_not_causal(mask: Tensor, by_lengths: bool) -> bool:
    """Whether ``mask[B, 1, S, L]`` is the same for all queries, as the view that ``saying_not_causal`` makes.

    Kernels ``by_lengths`` take one of padding; others one of a single number, which hides nothing.
    """
    return mask.dtype == torch.bool and mask.stride(2) == 0 and (by_lengths or not any(mask.stride()))


def _as_numbers(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """``mask`` as it is added to scores of ``dtype`` and reaches the softmax, which is computed in float32."""
    wide = torch.promote_types(mask.dtype, dtype)
    return mask.to(torch.float32 if wide == torch.float64 != dtype else wide)


def _collected() -> bool:
    """Whether the model's forward collects attention weights, though the model doesn't pass ``output_attentions`` on.

    GPT-2 and OPT don't: transformers' hooks on their attention modules collect the weights.
    """
    if _collector is None or torch.compiler.is_compiling():
        return False
    return any("attentions" in name for name in _collector.get() or ())


def _own_function(module: Any) -> Function:
    reached = dict(global_functions(current_forward(module)))
    found = {id(value): value for name, value in reached.items() if name.endswith(EAGER_FUNCTION)}
    if len(found) != 1:
        raise ConfigError(
            f"output_attentions: {type(module).__name__} has no eager attention function that could give the weights; "
            "choose eager for attn_implementation, or leave output_attentions out"
        )
    return next(iter(found.values()))


def _added(
    mask: Any, module: Any, query: Tensor, key: Tensor, options: Mapping[str, Any], from_the_first_key: bool
) -> Tensor | None:
    """The mask as eager attention takes it: added, and the lowest number of the dtype where a query sees no key."""
    if is_dense(mask):
        kept = mask
    elif mask is not None and not isinstance(mask, Tensor):
        from torch.nn.attention.flex_attention import create_mask

        batch, heads = mask.shape[:2]
        kept = create_mask(mask.mask_mod, batch, heads, query.shape[2], key.shape[2], device=query.device.type)
    else:
        of_queries, of_keys = options.get("cu_seq_lens_q"), options.get("cu_seq_lens_k")
        causal, window = _is_causal(module, options), options.get("sliding_window")
        first = from_the_first_key and mask is None
        scores = query.new_empty(()).expand(query.shape[2], key.shape[2])
        kept = visible(scores, causal, window, of_queries, of_keys, first)[None, None]
        if mask is not None:  # it may end where a static cache's unwritten keys begin
            unwritten = key.shape[2] - mask.shape[1]
            kept = torch.nn.functional.pad(kept[..., unwritten:], (0, unwritten)) if causal and unwritten else kept
            kept = kept & torch.nn.functional.pad(mask.bool(), (0, unwritten))[:, None, None, :]
    if kept.dtype != torch.bool:
        return kept
    added = torch.zeros(kept.shape, dtype=query.dtype, device=kept.device)
    return added.masked_fill(~kept, torch.finfo(query.dtype).min)


def _is_causal(module: Any, options: Mapping[str, Any]) -> bool:
    given = options.get("is_causal")
    return bool(getattr(module, "is_causal", True) if given is None else given)
