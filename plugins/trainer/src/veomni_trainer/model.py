"""Builds a job's model: its config checked against the data, its weights and kernels by the core."""

from __future__ import annotations

import difflib
import inspect
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from veomni_core import OpsConfig, build_foundation_model
from veomni_core.errors import ConfigError, UnknownNameError
from veomni_core.model_config import load_model_config
from veomni_trainer.job import Job
from veomni_trainer.tokens import Tokenizer

_VOCABULARY_STEP = 64
_NEVER_LISTED = {"model_type", "partial_rotary_factor", "rope_scaling", "rope_theta", "torch_dtype"}


def build_model(
    job: Job, ops: OpsConfig, tokenizer: Tokenizer, device: torch.device, checkpoint: Path | None = None
) -> PreTrainedModel:
    """The job's model on ``device``, bound, with the weights of ``checkpoint``, of the job, or random ones.

    Raises:
        ConfigError: the config and the data don't go together, or the config has a key that its model doesn't know.
        VeOmniError: whatever the core finds wrong with config, kernels or weights.
    """
    return _build(job, ops, tokenizer, str(device), checkpoint or job.model.weights)


def build_skeleton(job: Job, ops: OpsConfig, tokenizer: Tokenizer) -> PreTrainedModel:
    """The job's model, bound, on the meta device: every module and shape, and not one weight.

    Raises:
        VeOmniError: as :func:`build_model`, but for what is wrong with weights.
    """
    return _build(job, ops, tokenizer, "meta", None)


def _build(job: Job, ops: OpsConfig, tokenizer: Tokenizer, device: str, weights: Path | str | None) -> PreTrainedModel:
    return build_foundation_model(
        _config(job, tokenizer),
        weights,
        ops_implementation=ops,
        torch_dtype=job.model.dtype,
        init_device=device,
        trust_remote_code=job.model.trust_remote_code,
    )


def _config(job: Job, tokenizer: Tokenizer) -> PretrainedConfig:
    source = job.model.config if job.model.config is not None else job.model.weights
    assert source is not None
    config = load_model_config(source, trust_remote_code=job.model.trust_remote_code)
    text_config = config.get_text_config()
    if isinstance(source, dict):
        _check_keys(source, type(config))
        if "vocab_size" not in source and job.model.weights is None:
            text_config.vocab_size = -(-tokenizer.vocab_size // _VOCABULARY_STEP) * _VOCABULARY_STEP
    if text_config.vocab_size < tokenizer.vocab_size:
        raise ConfigError(
            f"model.config.vocab_size is {text_config.vocab_size}, but data.tokenizer has {tokenizer.vocab_size} "
            "tokens; raise it, or leave it out"
        )
    longest = getattr(text_config, "max_position_embeddings", None)
    if longest is not None and job.data.sequence_length > longest:
        raise ConfigError(
            f"data.sequence_length is {job.data.sequence_length}, but the model's max_position_embeddings is {longest}"
        )
    return config


def _check_keys(config: dict[str, Any], config_class: type[PretrainedConfig]) -> None:
    """transformers keeps every key, so a misspelt size would silently leave the default in force.

    Models also read keys that their config class doesn't list; so only one that resembles a listed key is refused.
    """
    try:
        defaults = config_class().to_dict()
    except Exception:  # a config without defaults can't say which keys it knows
        return
    known = {*defaults, *inspect.signature(config_class.__init__).parameters, *config_class.attribute_map}
    for key in config:
        close = difflib.get_close_matches(str(key), known, n=1, cutoff=0.8)
        if key not in known and key not in _NEVER_LISTED and close:
            raise UnknownNameError(
                f"model.config.{key}: {config['model_type']} has no such key. Did you mean {close[0]!r}?"
            )
