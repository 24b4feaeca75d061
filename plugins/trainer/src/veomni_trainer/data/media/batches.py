"""Sequences of chats with media, and the batches that the model's processor makes of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from veomni_core.errors import ConfigError, JobFileError
from veomni_trainer.data.batches import CHAT, Batcher
from veomni_trainer.data.media.processor import MediaProcessor
from veomni_trainer.data.media.rows import MediaChat
from veomni_trainer.data.reading import BadMedia
from veomni_transformers.packed.document_positions import DocumentPositions

Metadata = Callable[[Mapping[str, Any]], dict[str, Any]]
_TOKENS = ("input_ids", "attention_mask", "labels")  # the batch's own; PaliGemma's processor learns nothing of a chat
_SIZES = {"image_grid_thw": "image", "video_grid_thw": "video", "second_per_grid_ts": "video"}  # of each medium
_CROSSED = "cross_attention_mask"  # of tokens, images and their tiles
_KINDS = ("token_type_ids", "mm_token_type_ids")  # of tokens; models that take these want them for text too


class MediaBatcher:
    """Makes batches as :class:`Batcher`, with what the processor makes of the batch's media.

    The media are decoded here, again in each epoch: their pixels are never stored.

    Args:
        batcher: pads tokens and labels.
        processor: the model's.
        positions: computes the positions of a packed document; ``None`` of a model that counts its tokens alone.
        metadata: gives what the model's towers would compute of a batch in forward, which is added to it; such as
            :class:`veomni_transformers.towers.host_metadata.HostMetadata`.
    """

    def __init__(
        self,
        batcher: Batcher,
        processor: MediaProcessor,
        positions: DocumentPositions | None = None,
        metadata: Metadata | None = None,
    ) -> None:
        self._batcher, self._processor = batcher, processor
        self._positions, self._metadata = positions, metadata

    def __call__(self, sequences: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        rows = [{name: value for name, value in each.items() if name != CHAT} for each in sequences]
        batch = self._batcher(rows)
        places = [(number, *placed) for number, each in enumerate(sequences) for placed in each.get(CHAT, ())]
        shape = batch["input_ids"].shape
        for name in _KINDS:
            if name in self._processor.loaded.model_input_names:
                batch[name] = torch.zeros(shape, dtype=torch.long)
        if places:
            self._add(batch, places)
            if self._processor.gives_positions and "position_ids" not in batch:
                batch.setdefault("attention_mask", torch.ones(shape, dtype=torch.long))
        # Positions of packed documents are the batch's own.
        return batch if self._metadata is None else {**self._metadata(batch), **batch}

    def _add(self, batch: dict[str, Tensor], places: Sequence[tuple[int, slice, MediaChat]]) -> None:
        """Add what the processor makes of the chats in ``places``: the row and the part of it that is a chat's own."""
        chats = [chat for _, _, chat in places]
        try:
            media = [chat.decoded(self._processor) for chat in chats]
            found = self._processor.inputs(
                [chat.text for chat in chats], media, return_tensors="pt", padding=True, padding_side="right"
            )
        except BadMedia as problem:
            raise JobFileError(f"{chats[0].origin}: {problem}, which could be read before training") from problem
        processed = found["input_ids"].shape
        for ids, (number, span, chat) in zip(found["input_ids"], places, strict=True):
            if not torch.equal(ids[: span.stop - span.start], batch["input_ids"][number, span]):
                raise JobFileError(
                    f"{chat.origin}: its media give other tokens than when it was read: a file of them has changed. "
                    "Start again, with data.cache: false if it does so again"
                )
        for name, value in found.items():
            if name in _TOKENS or not isinstance(value, Tensor):
                continue
            if value.shape[:2] == processed and (value.ndim == 2 or name == _CROSSED):  # of tokens
                whole = torch.zeros(*batch["input_ids"].shape, *value.shape[2:], dtype=value.dtype)
                for each, (number, span, _) in zip(value, places, strict=True):
                    whole[number, span] = each[: span.stop - span.start]
                batch[name] = whole
            else:
                batch[name] = value
        if "position_ids" in batch and self._positions is not None:
            self._place(batch, places)

    def _place(self, batch: dict[str, Tensor], places: Sequence[tuple[int, slice, MediaChat]]) -> None:
        """Give the media of packed documents their positions, which the model computes for each document alone."""
        assert self._positions is not None
        taken = dict.fromkeys(_SIZES.values(), 0)
        for number, span, chat in places:
            document = {
                name: batch[name][number : number + 1, span] for name in ("input_ids", *_KINDS) if name in batch
            }
            counts = Counter(each.kind for each in chat.media)
            for name, kind in _SIZES.items():
                if name in batch and counts[kind]:
                    document[name] = batch[name][taken[kind] : taken[kind] + counts[kind]]
            taken = {kind: start + counts[kind] for kind, start in taken.items()}
            try:
                batch["position_ids"][1:, number, span] = self._positions(document)
            except ValueError as problem:
                raise ConfigError(f"data.packing: {problem}; write data.packing: false") from problem
