"""Sequences of chats with media, and the batches that the model's processor makes of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from veomni_core.errors import JobFileError
from veomni_trainer.data.batches import CHAT, Batcher
from veomni_trainer.data.media.processor import MediaProcessor
from veomni_trainer.data.media.rows import MediaChat
from veomni_trainer.data.reading import BadMedia

Metadata = Callable[[Mapping[str, Any]], dict[str, Any]]
_TOKENS = ("input_ids", "attention_mask")
_KINDS = ("token_type_ids", "mm_token_type_ids")  # of tokens; models that take these want them for text too


class MediaBatcher:
    """Makes batches as :class:`Batcher`, with what the processor makes of the batch's media.

    The media are decoded here, again in each epoch: their pixels are never stored.

    Args:
        batcher: pads tokens and labels.
        processor: the model's.
        metadata: gives what the model's towers would compute of a batch in forward, which is added to it; such as
            :class:`veomni_transformers.towers.host_metadata.HostMetadata`.
    """

    def __init__(self, batcher: Batcher, processor: MediaProcessor, metadata: Metadata | None = None) -> None:
        self._batcher, self._processor, self._metadata = batcher, processor, metadata

    def __call__(self, sequences: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        rows = [{name: value for name, value in each.items() if name != CHAT} for each in sequences]
        batch = self._batcher(rows)
        chats = {number: each[CHAT] for number, each in enumerate(sequences) if each.get(CHAT) is not None}
        shape = batch["input_ids"].shape
        for name in _KINDS:
            if name in self._processor.loaded.model_input_names:
                batch[name] = torch.zeros(shape, dtype=torch.long)
        if chats:
            self._add(batch, [*chats], [*chats.values()], [len(row["input_ids"]) for row in rows])
        return batch | (self._metadata(batch) if self._metadata is not None else {})

    def _add(self, batch: dict[str, Tensor], numbers: list[int], chats: list[MediaChat], lengths: list[int]) -> None:
        """Add what the processor makes of the ``chats`` in the rows ``numbers``."""
        try:
            media = [chat.decoded(self._processor) for chat in chats]
            found = self._processor.inputs(
                [chat.text for chat in chats], media, return_tensors="pt", padding=True, padding_side="right"
            )
        except BadMedia as problem:
            raise JobFileError(f"{chats[0].origin}: {problem}, which could be read before training") from problem
        processed = found["input_ids"].shape
        for number, ids, chat in zip(numbers, found["input_ids"], chats, strict=True):
            length = lengths[number]
            if not torch.equal(ids[:length], batch["input_ids"][number, :length]):
                raise JobFileError(
                    f"{chat.origin}: its media give other tokens than when it was read: a file of them has changed. "
                    "Start again, with data.cache: false if it does so again"
                )
        for name, value in found.items():
            if name in _TOKENS or not isinstance(value, Tensor):
                continue
            if value.shape[:2] == processed and value.ndim == 2:  # of tokens
                whole = torch.zeros(batch["input_ids"].shape, dtype=value.dtype)
                width = min(whole.shape[1], processed[1])
                whole[numbers, :width] = value[:, :width]
                batch[name] = whole
            else:
                batch[name] = value
