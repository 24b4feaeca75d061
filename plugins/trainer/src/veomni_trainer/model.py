"""Builds a job's model: its config checked against the data, its weights and kernels by the core."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PretrainedConfig, PreTrainedModel

from veomni_core import JobConditions, OpsConfig, build_foundation_model
from veomni_core.errors import ConfigError
from veomni_core.model_config import load_model_config
from veomni_trainer.job import Job
from veomni_trainer.tokens import Tokenizer

_VOCABULARY_STEP = 64


def ops_config(job: Job) -> OpsConfig:
    """Which kernels the job chooses.

    Raises:
        ConfigError: it doesn't say, or names a field, value or preset that isn't there.
    """
    return OpsConfig.from_dict({"model": {"ops_implementation": job.model.ops_implementation}})


def conditions(job: Job) -> JobConditions:
    """What the job's plan depends on beside its model."""
    return JobConditions(
        device="cpu" if job.train.device == "cpu" else None, autocast="bfloat16" if job.train.bf16 else None
    )


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
    under = conditions(job)
    return build_foundation_model(
        model_config(job, tokenizer),
        weights,
        ops_implementation=ops,
        torch_dtype=job.model.dtype,
        init_device=device,
        autocast=under.autocast,
        device=under.device,
        trust_remote_code=job.model.trust_remote_code,
    )


def model_config(job: Job, tokenizer: Tokenizer) -> PretrainedConfig:
    """The config of the job's model, its vocabulary the tokenizer's where the job gives neither one nor weights.

    Raises:
        ConfigError: the model has too few embeddings or positions for the data, or the config can't be read.
    """
    source = job.model.source
    config = load_model_config(source, trust_remote_code=job.model.trust_remote_code)
    text_config = config.get_text_config()
    if isinstance(source, dict) and "vocab_size" not in source and job.model.weights is None:
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
