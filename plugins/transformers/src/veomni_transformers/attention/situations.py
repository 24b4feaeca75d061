"""The calls of a decoder in which attention gets other masks than in training: caches, and padding to the left."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

_BATCH, _TOKENS = 2, 9
_PARTS = (5, 3, 1)  # how many tokens come at once: several in an empty cache, several after those, and one
_SLOTS = 14  # of a static cache: more than the tokens that are written into it
_PADDING = 3


def situations(model: Any, at_padding: bool) -> Iterator[tuple[str, Callable[[Any], Tensor]]]:
    """By name, functions of a model that give what ``model``, or its bound self, computes for every token.

    ``at_padding``: also what it computes for tokens that are padding.
    """
    parameters = inspect.signature(type(model).forward).parameters
    config = getattr(model, "config", None)
    if not {"input_ids", "past_key_values"} <= set(parameters) or getattr(config, "is_encoder_decoder", True):
        return
    yield "a static cache", partial(_in_parts, static=True)
    yield "a cache that grows", partial(_in_parts, static=False)
    if "attention_mask" in parameters:
        yield "padding to the left", partial(_padded, at_padding=at_padding)


def _in_parts(model: Any, static: bool) -> Tensor:
    from transformers import DynamicCache, StaticCache

    cache = StaticCache(config=model.config, max_cache_len=_SLOTS) if static else DynamicCache(config=model.config)
    parts = _tokens(model).split(_PARTS, 1)
    with torch.no_grad():
        return torch.cat([_result(model, part, past_key_values=cache, use_cache=True) for part in parts], dim=1)


def _padded(model: Any, at_padding: bool) -> Tensor:
    tokens = _tokens(model)
    mask = torch.ones_like(tokens)
    mask[0, :_PADDING] = 0
    with torch.no_grad():
        result = _result(model, tokens, attention_mask=mask, use_cache=False)
    return result if at_padding else result[mask.bool()]


def _result(model: Any, tokens: Tensor, **inputs: Any) -> Tensor:
    was_training = model.training
    model.eval()
    try:
        output = model(input_ids=tokens, **inputs)
    finally:
        model.train(was_training)
    found: Tensor = output.logits if "logits" in output else output.last_hidden_state
    return found


def _tokens(model: Any) -> Tensor:
    device = next(model.parameters()).device
    vocabulary = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    return torch.randint(min(vocabulary, 512), (_BATCH, _TOKENS), generator=generator).to(device)
