"""A job's model and tokenizer, which are checked against its data; the core loads weights and binds kernels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig, PreTrainedModel

from veomni_core import OpsConfig, Plan, build_foundation_model
from veomni_core.errors import CheckpointError, ConfigError
from veomni_trainer.data.tokens import ByteTokenizer, Tokenizer, has_tokenizer, load_tokenizer
from veomni_trainer.job.data_section import BYTES
from veomni_trainer.job.parameter_groups import check_groups
from veomni_trainer.job.schema import Job
from veomni_trainer.output.shards import reason
from veomni_trainer.setup.adapter import check_adapter, quantization_config
from veomni_trainer.setup.conditions import conditions, weights_dtype
from veomni_trainer.setup.method_models import as_scorer, check_causal, has_new_head
from veomni_trainer.setup.processes import check_sharding
from veomni_trainer.setup.towers import freeze, settle_media
from veomni_transformers import build
from veomni_transformers.jobs.model_config import load_model_config
from veomni_transformers.plugin_models import tokenizer_in
from veomni_transformers.towers.parts import tower_of, towers

_VOCABULARY_STEP = 64


def check_model(job: Job, tokenizer: Tokenizer, checkpoint: Path | None = None) -> None:
    """Check, without weights or processes, that the job's model fits its data and its sizes.

    Which media rows may have is the model's to say, and is settled here.

    Raises:
        ConfigError: as :func:`model_config`, where the model is no causal language model, and where the job's sizes
            can't shard it.
        HostError: this machine's libraries can't shard models, or the processes are not as many as the sizes need.
        CheckpointError: the run goes on from ``checkpoint``, whose adapter is another one.
    """
    config = model_config(job, tokenizer)
    skeleton: Any = unbound_skeleton(job, config)
    if not job.train.scores_sequences:
        check_causal(skeleton)
    settle_media(job, tokenizer, skeleton)
    if job.train.is_sharded:
        check_sharding(job.train, skeleton)
    if job.lora:
        skeleton = check_adapter(job, skeleton, checkpoint)
        # TRL's trainers multiply by the head's weight itself, so an adapter there would not be trained.
        if job.train.takes_logprobs and hasattr(skeleton.get_output_embeddings(), "base_layer"):
            raise ConfigError(
                f"train.method: {job.train.method} reads the output projection's weight past its adapter, which would "
                "not be trained; leave the head out of lora.target_modules"
            )
    freeze(skeleton, job.train.freeze)
    trained = [name for name, parameter in skeleton.named_parameters() if parameter.requires_grad]
    found = towers(skeleton) if any(group.tower for group in job.train.parameter_groups) else {}
    check_groups(job.train.parameter_groups, {name: tower_of(found, name) for name in trained})


def build_model(
    job: Job,
    ops: OpsConfig,
    tokenizer: Tokenizer,
    device: torch.device,
    checkpoint: Path | None = None,
    check_plan: Callable[[Plan], None] | None = None,
) -> PreTrainedModel:
    """The job's model on ``device``, bound to its kernels.

    The weights are those of ``checkpoint`` (unless it holds an adapter over the job's), otherwise those that the job
    names, otherwise random. ``check_plan`` is called before they are loaded.

    Raises:
        ConfigError: the config doesn't fit the data, or has a key that its model doesn't know.
        VeOmniError: the core finds an error in config, kernels or weights.
    """
    given = job.model.located(with_weights=job.lora is not None or checkpoint is None).weights
    weights = given if job.lora else checkpoint or given
    under = conditions(job)
    try:
        model = bound_model(
            job,
            model_config(job, tokenizer),
            ops,
            str(device),
            weights_path=weights,
            distributed_config=under.distributed_config,
            quantization_config=quantization_config(job),
            resize_embeddings=job.model.resize_embeddings and weights is not None,
            verify=job.train.verify,
            check_plan=check_plan,
            batch=under.batch,
            new_head=weights == job.model.located().weights and has_new_head(job),
        )
    except CheckpointException as error:  # of torch's distributed checkpoints; no Exception, so the core passes it by
        raise CheckpointError(f"{weights} does not fit this model: {reason(error)}") from error
    if weights is not None:
        _refuse_not_finite(model, weights)
    freeze(model, job.train.freeze)
    return model


def _refuse_not_finite(model: PreTrainedModel, weights: Path | str) -> None:
    """Raise CheckpointError if this rank's part of a weight holds NaN or an infinity: no setting would mend that."""
    found = {}
    for name, parameter in model.named_parameters():
        part = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if part.is_floating_point() and part.element_size() > 1:  # torch can't say it of 8 bits
            found[name] = torch.isfinite(part.detach()).all()
    if bad := [name for name, finite in found.items() if not finite]:
        more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        raise CheckpointError(
            f"{weights}: {bad[0]}{more} holds values that are not finite, so every loss would be nan. Copy or download "
            "the weights again, or use earlier ones"
        )


def unbound_skeleton(job: Job, config: PretrainedConfig) -> PreTrainedModel:
    """The job's model in its own code, on the meta device."""
    return build.build_skeleton(
        config,
        torch_dtype=weights_dtype(job),
        trust_remote_code=job.model.trust_remote_code,
        modeling=job.model.modeling,
    )


def build_skeleton(job: Job, ops: OpsConfig, tokenizer: Tokenizer) -> PreTrainedModel:
    """The job's model, bound, on the meta device: all modules and shapes, without weights.

    Raises:
        VeOmniError: as :func:`build_model`, except for errors in weights.
    """
    return bound_model(job, model_config(job, tokenizer), ops, "meta", batch=conditions(job).batch)


def bound_model(job: Job, config: PretrainedConfig, ops: OpsConfig, device: str, **more: Any) -> PreTrainedModel:
    """A model of ``config`` on ``device``, bound as the job's; ``more`` is for the core."""
    under = conditions(job)
    return build_foundation_model(
        config,
        ops_implementation=ops,
        torch_dtype=weights_dtype(job),
        init_device=device,
        autocast=under.autocast,
        device=under.device,
        trust_remote_code=job.model.trust_remote_code,
        modeling=job.model.modeling,
        **more,
    )


def model_config(job: Job, tokenizer: Tokenizer) -> PretrainedConfig:
    """The config of the job's model.

    If the job gives neither ``vocab_size`` nor weights, the vocabulary size is the tokenizer's, rounded up.

    Raises:
        ConfigError: the model has too few embeddings or positions for the data, or the config can't be read.
    """
    source = job.model.located().source
    config = load_model_config(source, trust_remote_code=job.model.trust_remote_code)
    text_config = config.get_text_config()
    if isinstance(source, dict) and "vocab_size" not in source and job.model.weights is None:
        text_config.vocab_size = padded_vocabulary(tokenizer.vocab_size)
    if text_config.vocab_size < tokenizer.vocab_size and job.model.resize_embeddings:
        text_config.vocab_size = padded_vocabulary(tokenizer.vocab_size)
    if text_config.vocab_size < tokenizer.vocab_size:
        counts = f"is {text_config.vocab_size}, but data.tokenizer has {tokenizer.vocab_size} tokens"
        raise ConfigError(
            f"model.config.vocab_size {counts}; raise it, or leave it out"
            if job.model.weights is None
            else f"vocab_size of {job.model.weights} {counts}. Write model.resize_embeddings: true to give the weights "
            "more embeddings, which are drawn around the mean of theirs and trained, or name the tokenizer that the "
            "weights were trained with"
        )
    if job.train.scores_sequences:
        as_scorer(config, job, tokenizer)
    longest = getattr(text_config, "max_position_embeddings", None)
    if longest is not None and 0 < longest < job.data.sequence_length:  # XLNet says -1
        raise ConfigError(
            f"data.sequence_length is {job.data.sequence_length}, but the model's max_position_embeddings is "
            f"{longest}; lower data.sequence_length"
        )
    return config


def padded_vocabulary(tokens: int) -> int:
    """The number of embeddings of a new model for so many tokens."""
    return -(-tokens // _VOCABULARY_STEP) * _VOCABULARY_STEP


def job_tokenizer(job: Job) -> Tokenizer:
    """The job's tokenizer.

    Raises:
        ConfigError: the job names bytes for weights that come with a tokenizer, or no tokenizer for weights that come
            without one and whose embeddings are too many for bytes.
        JobFileError: as :func:`load_tokenizer`.
    """
    data, section = job.data, job.model.located()
    weights, name = section.weights, data.tokenizer
    if weights is not None and has_tokenizer(Path(weights)):
        if name == BYTES:
            raise ConfigError(
                f"data.tokenizer is bytes, but {weights} comes with the tokenizer that its weights were trained with. "
                "Remove data.tokenizer to use that one, or write the path of another"
            )
        name = name or weights
    elif name is None and weights is not None:
        if not Path(weights).is_dir():  # the core refuses them, or assumes that the hardware planned for has them
            return ByteTokenizer()
        config = load_model_config(section.source, trust_remote_code=section.trust_remote_code)
        embeddings = config.get_text_config().vocab_size
        if embeddings > padded_vocabulary(ByteTokenizer.vocab_size):
            raise ConfigError(
                f"data.tokenizer is missing: {weights} has {embeddings:,} embeddings and comes without a tokenizer. "
                "Write data.tokenizer: the path of the one that its weights were trained with (bytes, if they were "
                "trained on bytes)"
            )
    trust = job.model.trust_remote_code
    return load_tokenizer(name or BYTES, data.end_of_document, data.chat_template, trust, data.image_pixels)


def other_ids(job: Job, tokenizer: Tokenizer) -> tuple[str, ...]:
    """A warning where the job's tokenizer gives tokens other ids than that of its weights, which learned those."""
    weights = job.model.located().weights
    if job.data.tokenizer is None or weights is None or not has_tokenizer(Path(weights)) or not tokenizer.pretrained:
        return ()
    own = tokenizer_in(Path(weights), job.model.trust_remote_code).get_vocab()
    ids = tokenizer.pretrained.get_vocab()
    moved = sum(own.get(token, number) != number for token, number in ids.items())
    if not moved:
        return ()
    return (
        f"warning: data.tokenizer gives {moved:,} of its {len(ids):,} tokens other ids than the tokenizer of "
        "model.weights, so the weights take them for other tokens",
    )
