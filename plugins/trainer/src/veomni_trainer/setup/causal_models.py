"""Whether a model learns what the job's methods teach: at each position the next token, from those before it."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from veomni_core.errors import ConfigError
from veomni_core.random_states import random_states_kept
from veomni_trainer.setup.document_gradients import sees_later_tokens
from veomni_transformers.losses.causal import CausalLosses

_TOKENS = 8


def check_causal(skeleton: Any) -> None:
    """Raise ConfigError unless ``skeleton``, on the meta device, is a causal language model.

    Its loss is proven to be that of the next token, or transformers lists its class among causal models. Where the
    config says whether it is a decoder, a small copy is run.
    """
    config, kind = skeleton.config, type(skeleton).__name__
    causal = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    listed = (causal, MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.get(config.model_type))
    what_to_do = "Classifiers, reward models and models that fill in masked words can't be trained yet"
    if causal and causal != kind:
        what_to_do = f"If the weights have such a head, write architectures: [{causal}] into their config. {what_to_do}"
    if why := _why_not_causal(skeleton, listed):
        raise ConfigError(
            f"model: {kind} is no causal language model, and train.method teaches the next token: {why}. {what_to_do}"
        )
    if getattr(config, "is_decoder", None) is False and _copies_its_input(config):
        raise ConfigError(
            f"model: {kind} sees the tokens that come after a position, so it would learn to copy its input instead of "
            "the next token. Write is_decoder: true into its config (model.config)"
        )


def _why_not_causal(model: Any, listed: tuple[str | None, ...]) -> str:
    if model.config.is_encoder_decoder:
        return "it reads a question by an encoder, and answers by a decoder"
    sites = [site for site in CausalLosses().find(model, "") if not site.path]
    if not sites:
        return "it has no output projection to words, or takes no labels"
    if sites[0].variant is None and hasattr(transformers, type(model).__name__) and type(model).__name__ not in listed:
        return sites[0].evidence
    return ""


def _copies_its_input(config: Any) -> bool:
    """Whether one random layer of the model lets a position see later ones."""
    small = copy.deepcopy(config)
    small.get_text_config().num_hidden_layers = 1
    with random_states_kept():
        model = AutoModelForCausalLM.from_config(small, dtype=torch.float32, attn_implementation="eager").eval()
        return sees_later_tokens(model, torch.randint(config.get_text_config().vocab_size, (1, _TOKENS)))
