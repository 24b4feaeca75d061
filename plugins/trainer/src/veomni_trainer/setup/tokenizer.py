"""Chooses the tokenizer of a job: the one that it names, else that of its weights, else bytes."""

from __future__ import annotations

from pathlib import Path

from veomni_core.errors import ConfigError
from veomni_trainer.data.tokens import ByteTokenizer, Tokenizer, has_tokenizer, load_tokenizer
from veomni_trainer.job.data_section import BYTES
from veomni_trainer.job.schema import Job
from veomni_trainer.setup.model import padded_vocabulary
from veomni_transformers.jobs.model_config import load_model_config
from veomni_transformers.plugin_models import tokenizer_in


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
