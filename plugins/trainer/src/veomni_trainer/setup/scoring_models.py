"""Models that score whole sequences: reward models and classifiers, also out of weights that have no such head."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from veomni_core.errors import ConfigError, JobFileError
from veomni_trainer.data.corpus import Corpus
from veomni_trainer.data.tokens import Tokenizer
from veomni_trainer.job.method_keys import ClassifyKeys
from veomni_trainer.job.schema import Job
from veomni_transformers.jobs.model_config import load_model_config

_UNREAD = ["0", "1"]  # labels of a model that is built before the data is read: their number changes no plan


def as_scorer(config: PretrainedConfig, job: Job, tokenizer: Tokenizer) -> None:
    """Make ``config`` that of transformers' sequence classifier, with a score for each label, or one as a reward.

    Raises:
        ConfigError: transformers has no sequence classifier of this type.
    """
    name = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(config.model_type)
    if name is None or config.is_encoder_decoder:  # whose decoder would be asked for the score
        raise ConfigError(
            f"train.method: {job.train.method} needs a sequence classifier without a decoder of its own, and "
            f"transformers has none of model_type {config.model_type}. Train another model"
        )
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


def has_scores(job: Job) -> bool:
    """Whether the job's weights have a head of scores themselves; if not, one is drawn."""
    stored = _stored_config(job)
    return stored is not None and any("ForSequenceClassification" in name for name in stored.architectures or ())


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
    """Distinct labels: integers by their size, others by the alphabet.

    Example:
        >>> _in_order(["10", "9", "9"]), _in_order(["no", "maybe"])
        (['9', '10'], ['maybe', 'no'])
    """
    found = set(labels)
    numbers = all(each.lstrip("-").isdecimal() for each in found)
    return sorted(found, key=int) if numbers else sorted(found)
