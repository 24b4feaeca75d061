"""Masks of packed sequences for decoders that build theirs without positions, as GPT-OSS's does.

Such a decoder mixes packed sequences, in transformers' own code too. It takes masks that are prepared by its caller.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from veomni_transformers.packed.mask_calls import CAUSAL, SLIDING, mask_builders, mask_calls
from veomni_transformers.packed.packed_sequences import mask_functions
from veomni_transformers.proving.functions import current_forward

_LAYERS = {CAUSAL: "full_attention", SLIDING: "sliding_attention"}  # the types whose masks these functions build


def prepared_masks(model: PreTrainedModel, position_ids: Tensor) -> dict[str, Any]:
    """The ``attention_mask`` for packed sequences, if the decoder of ``model`` does not build it of their positions.

    Args:
        model: a causal language model, bound or not.
        position_ids: integers ``[B, S]``, which begin again where a sequence begins.

    Returns:
        The argument by name, one mask or one for each type of layer; nothing for other decoders.

    Example:
        >>> from transformers import AutoModelForCausalLM, GptOssConfig
        >>> small = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1}
        >>> config = GptOssConfig(**small, head_dim=8, num_hidden_layers=2, num_local_experts=2, vocab_size=8)
        >>> model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        >>> masks = prepared_masks(model, torch.tensor([[0, 1, 0]]))["attention_mask"]
        >>> (masks["full_attention"] == 0)[0, 0]  # what each token sees
        tensor([[ True, False, False],
                [ True,  True, False],
                [False, False,  True]])
    """
    decoder: Any = model.get_decoder()
    builders = dict(mask_builders(current_forward(decoder)))
    if not builders:  # a module of the decoder calls them, or it is no decoder, as a head of that name
        return {}
    embeddings = torch.zeros(*position_ids.shape, getattr(decoder.config, "hidden_size", 1))
    inputs = {"inputs_embeds": embeddings, "position_ids": position_ids.cpu()}
    called = {name: calls for name, calls in mask_calls(decoder, builders, inputs).items() if calls}
    every = [call for calls in called.values() for call in calls]
    by_positions = any(args or call.get("position_ids") is not None for args, call in every)
    if not every or by_positions or not mask_functions(decoder).issubset(_LAYERS):  # others: of recurrent layers
        return {}
    built = {_LAYERS[name]: _build(builders[name], decoder.config, position_ids, model.dtype) for name in called}
    return {"attention_mask": built if len(built) > 1 else next(iter(built.values()))}


def _build(build: Callable[..., Any], config: Any, position_ids: Tensor, dtype: torch.dtype) -> Tensor | None:
    rows, length = position_ids.shape
    given = {
        "config": config,
        "attention_mask": None,
        "past_key_values": None,
        "position_ids": position_ids,
        # Names of transformers before 5.6.
        "cache_position": torch.arange(length, device=position_ids.device),
        **dict.fromkeys(("inputs_embeds", "input_embeds"), position_ids.new_empty(rows, length, 1, dtype=dtype)),
    }
    known = inspect.signature(build).parameters
    mask: Tensor | None = build(**{name: value for name, value in given.items() if name in known})
    return mask
