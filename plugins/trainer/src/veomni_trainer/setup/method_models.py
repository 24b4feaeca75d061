"""Models that suit a job's method: causal ones for the next token, and those that score whole sequences."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)

from veomni_core.errors import ConfigError, JobFileError
from veomni_trainer.data.corpus import Corpus
from veomni_trainer.data.tokens import Tokenizer
from veomni_trainer.job.method_keys import ClassifyKeys
from veomni_trainer.job.schema import Job
from veomni_transformers.jobs.model_config import load_model_config
from veomni_transformers.losses.head_twin import VOCABULARY, decoder_width, head_twin
from veomni_transformers.losses.language_models import language_models
from veomni_transformers.packed.document_gradients import sees_later_tokens
from veomni_transformers.proving import probe

_TOKENS, _ROUNDING = 8, 1e-3
_SCALE = 30  # of hidden states, so that the words' logits differ by more than their mean over positions hides
_INTEGER = re.compile("0|-?[1-9][0-9]{0,99}")  # no two of them are equal, and Python reads each
_UNREAD = ["0", "1"]  # labels of a model that is built before the data is read: their number changes no plan


def check_causal(skeleton: Any) -> None:
    """Raise ConfigError unless ``skeleton``, on the meta device, is a causal language model.

    Its own loss is proven to be the next tokens', or can't be compared and transformers lists its class among causal
    models: there too are some, as BART's decoder, that compare each position with its own label. Where the config says
    that it may see both ways, a small copy is run.
    """
    config, kind = skeleton.config, type(skeleton).__name__
    causal = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    listed = (causal, MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.get(config.model_type))
    what_to_do = (
        "To train scores of whole texts, write train.method: reward or classify; models that fill in masked words or "
        "label tokens can't be trained"
    )
    if causal and causal != kind:
        what_to_do = f"If the weights have such a head, write architectures: [{causal}] into their config. {what_to_do}"
    if why := _why_not_causal(skeleton, listed):
        raise ConfigError(
            f"model: {kind} is no causal language model, and train.method teaches the next token: {why}. {what_to_do}"
        )
    if (setting := _both_ways(config)) and _copies_its_input(config):
        raise ConfigError(
            f"model: {kind} sees the tokens that come after a position, so it would learn to copy its input instead of "
            f"the next token. Write {setting} into its config (model.config)"
        )


def _both_ways(config: Any) -> str:
    """What would make a model causal whose config says that it may not be; empty of others."""
    for name, value in {**vars(config), **vars(config.get_text_config())}.items():
        if name in ("is_decoder", "is_causal") and value is False:
            return f"{name}: true"
        if "bidirectional" in name and value:
            return f"{name}: false"
    return ""


def _why_not_causal(model: Any, listed: tuple[str | None, ...]) -> str:
    if model.config.is_encoder_decoder:
        return "it reads a question by an encoder, and answers by a decoder"
    found = next((each for each in language_models(model) if not each.path), None)
    if found is None:
        return "it has no output projection to words, or takes no labels"
    missed, why_not = probe.attempt(lambda: _missed_loss(model, found.head))
    if why_not:  # of code that comes with a model, nobody knows more
        unknown = type(model).__name__ in listed or not hasattr(transformers, type(model).__name__)
        return "" if unknown else f"its loss can't be compared: {why_not}"
    return "" if missed < _ROUNDING else "its loss is not that of the next token"


def _missed_loss(model: Any, head: Any) -> float:
    """How far the loss of the model's own code is from the next tokens' cross entropy, over random hidden states."""
    with probe.seeded():
        twin, _ = head_twin(model, head, _SCALE * probe.random(2, _TOKENS, decoder_width(model, head)))
        labels = torch.randint(VOCABULARY, (2, _TOKENS))
        output: Any = twin.forward(input_ids=labels, labels=labels)
        wanted = torch.nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return abs(float(output.loss) / float(wanted) - 1)


def _copies_its_input(config: Any) -> bool:
    """Whether one random layer of the model lets a position see later ones."""
    small = copy.deepcopy(config)
    small.get_text_config().num_hidden_layers = 1

    def copies() -> bool:
        model = AutoModelForCausalLM.from_config(small, dtype=torch.float32, attn_implementation="eager").eval()
        return sees_later_tokens(model, torch.randint(config.get_text_config().vocab_size, (1, _TOKENS)))

    with torch.random.fork_rng(devices=()):  # on the CPU
        seen, why_not = probe.attempt(copies)
    return bool(seen) and not why_not


def as_scorer(config: PretrainedConfig, job: Job, tokenizer: Tokenizer) -> None:
    """Make ``config`` that of transformers' sequence classifier, with a score for each label, or one as a reward.

    Raises:
        ConfigError: transformers has no sequence classifier of this type, or the weights' scores are of other labels.
    """
    name = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(config.model_type)
    if name is None or config.is_encoder_decoder:  # whose decoder would be asked for the score
        raise ConfigError(
            f"train.method: {job.train.method} needs a sequence classifier without a decoder of its own, and "
            f"transformers has none of model_type {config.model_type}. Train another model"
        )
    _check_stored_labels(job)
    config.architectures = [name]
    labels = ["reward"]
    if job.train.method == "classify":
        labels = (job.train.classify and job.train.classify.labels) or _UNREAD
        config.problem_type = "single_label_classification"
    config.id2label = dict(enumerate(labels))
    config.label2id = {label: number for number, label in enumerate(labels)}
    padding = tokenizer.pretrained.pad_token_id if tokenizer.pretrained else None
    # The score is that of the last token before the padding.
    config.get_text_config().pad_token_id = tokenizer.end if padding is None else padding  # type: ignore[attr-defined]


def _check_stored_labels(job: Job) -> None:
    """Raise ConfigError where the weights have scores already, and of other labels than the job's.

    As many names that the weights don't know may take the place of theirs.
    """
    if not has_scores(job):
        return
    config: Any = _stored_config(job)
    stored = [str(config.id2label[number]) for number in sorted(config.id2label)]
    there = f"{job.model.weights} is a classifier of {len(stored)} labels: {', '.join(stored)}"
    if job.train.method == "reward":
        if len(stored) > 1:
            raise ConfigError(
                f"train.method: reward trains one score, and {there}. Write method: classify, or name other weights"
            )
        return
    labels = (job.train.classify and job.train.classify.labels) or stored
    moved = [label in stored and stored.index(label) != number for number, label in enumerate(labels)]
    if len(labels) != len(stored) or any(moved):
        raise ConfigError(
            f"train.classify.labels: the job names {', '.join(labels)}, and {there}, in the order of its scores. Leave "
            "train.classify.labels out to take these, or name weights without scores"
        )


def has_scores(job: Job) -> bool:
    """Whether the job's weights have a head of scores themselves; if not, one is drawn."""
    stored = _stored_config(job)
    return stored is not None and any("ForSequenceClassification" in name for name in stored.architectures or ())


def has_new_head(job: Job) -> bool:
    """Whether the job's model has a head of scores, which its weights don't have."""
    return job.train.scores_sequences and not has_scores(job)


def with_labels(job: Job, corpus: Corpus) -> Job:
    """``job`` with all labels of a classifier in the order of its scores.

    Raises:
        JobFileError: the data has a label that the job or its weights don't know, or one label alone.
    """
    if job.train.method != "classify":
        return job
    settings = job.train.classify or ClassifyKeys()
    rows: Any = corpus.training
    found = _in_order(rows[settings.label])
    labels, whose = settings.labels, "train.classify.labels"
    if labels is None and has_scores(job):
        stored: Any = _stored_config(job)
        labels, whose = [str(stored.id2label[number]) for number in sorted(stored.id2label)], str(job.model.weights)
    if labels is not None and (missing := [label for label in found if label not in labels]):
        raise JobFileError(
            f"data.files: the label {missing[0]!r} in column {settings.label!r} is none of {whose}: "
            f"{', '.join(labels)}. Correct the data, or write all labels as train.classify.labels, in the order of the "
            "model's scores"
        )
    if labels is None and len(found) < 2:
        raise JobFileError(
            f"data.files: all rows have the label {found[0]!r}, so there is nothing to tell apart. Add rows of another "
            "label, or write train.classify.labels"
        )
    classify = settings.model_copy(update={"labels": labels or found})
    return job.model_copy(update={"train": job.train.model_copy(update={"classify": classify})})


def _stored_config(job: Job) -> PretrainedConfig | None:
    weights = job.model.located().weights
    if weights is None or not (Path(weights) / "config.json").is_file():
        return None
    return load_model_config(weights, trust_remote_code=job.model.trust_remote_code)


def _in_order(labels: Iterable[str]) -> list[str]:
    """Distinct labels: integers by their size, if all are written as such; others by the alphabet.

    Example:
        >>> _in_order(["10", "9", "9"]), _in_order(["no", "maybe"]), _in_order(["1", "01"])
        (['9', '10'], ['maybe', 'no'], ['01', '1'])
    """
    found = set(labels)
    numbers = all(_INTEGER.fullmatch(each) for each in found)
    return sorted(found, key=int) if numbers else sorted(found)
