"""``data.packing``: refuses a model that doesn't compute packed documents as it computes each of them alone."""

from __future__ import annotations

from itertools import accumulate, islice
from typing import Any

import torch
from transformers import PreTrainedModel

from veomni_core.errors import ConfigError
from veomni_trainer.data.batches import CHAT
from veomni_trainer.data.corpus import Corpus
from veomni_trainer.data.streaming import Stream
from veomni_transformers.packed.document_values import why_documents_mix, why_media_mix
from veomni_transformers.sequence.order import Order

_LOOKED_AT = 64  # sequences


def check_packing(
    model: PreTrainedModel,
    batch_size: int,
    autocast: str | None = None,
    order: Order | None = None,
) -> None:
    """Run ``model`` on packed documents and on the same documents alone. All ranks must call this together.

    Args:
        model: bound, with weights, on its device.
        batch_size: how many packed sequences a batch has.
        autocast: the type that the model trains under.
        order: where each sequence lies on the ranks that share it.

    Raises:
        ConfigError: the outputs differ; the message names the first module whose output does, or that stays eager.
    """
    _refuse(model, why_documents_mix(model, batch_size, autocast, order))


def check_packed_media(model: PreTrainedModel, corpus: Corpus, autocast: str | None = None) -> None:
    """Run ``model``, whole on each rank, on two documents with media: packed, and each alone.

    Raises:
        ConfigError: as :func:`check_packing`.
    """
    if corpus.processor is None:
        return
    # The two shortest documents with media of the first sequences, and the shortest behind them again. Before them
    # comes a document of text, so that media stand elsewhere in the sequence than in their documents.
    training: Any = corpus.training
    first = training.first(_LOOKED_AT) if isinstance(training, Stream) else islice(training, _LOOKED_AT)
    found = [(each["input_ids"][span], chat) for each in first for span, chat in each.get(CHAT, ()) if chat.media]
    two = sorted(found, key=lambda document: len(document[0]))[:2]
    if not two:
        return
    ids, chat = two[0]
    text: list[Any] = [(ids[chat.last :], None)] if chat.last < len(ids) else []
    documents, batcher = [*text, *two, two[0]], corpus.batcher()
    ends = [*accumulate(len(ids) for ids, _ in documents)]
    packed = {
        "input_ids": torch.cat([ids for ids, _ in documents]),
        "position_ids": torch.cat([torch.arange(len(ids)) for ids, _ in documents]),
        CHAT: [(slice(end - len(ids), end), chat) for end, (ids, chat) in zip(ends, documents, strict=True) if chat],
    }
    alone = [{"input_ids": ids, CHAT: [(slice(0, len(ids)), chat)] if chat else []} for ids, chat in documents]

    def inputs(sequence: dict[str, Any]) -> dict[str, Any]:
        return {name: value.to(model.device) for name, value in batcher([sequence]).items()}

    tokens = [token for token in corpus.processor.taken.values() if token is not None]
    _refuse(model, why_media_mix(model, inputs(packed), [*map(inputs, alone)], tokens, autocast))


def _refuse(model: PreTrainedModel, problem: str) -> None:
    if problem:
        raise ConfigError(
            f"data.packing: {type(model).__name__} {problem}. Write data.packing: false, or choose another kernel for "
            "the module that is named"
        )
