"""Puts sequences together into a batch, with what the model's processor makes of their media."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from veomni_core.errors import ConfigError, JobFileError
from veomni_core.kernels import IGNORED
from veomni_trainer.data.media.processor import MediaProcessor
from veomni_trainer.data.media.rows import MediaChat
from veomni_trainer.data.reading import BadMedia
from veomni_transformers.packed.document_positions import DocumentPositions

CHAT = "chat"  # under which a sequence has its chats with media, for what makes batches, each with its slice
Metadata = Callable[[Mapping[str, Any]], dict[str, Any]]
_TOKENS = ("input_ids", "attention_mask", "labels")  # the batch's own; PaliGemma's processor learns nothing of a chat
_SIZES = {"image_grid_thw": "image", "video_grid_thw": "video", "second_per_grid_ts": "video"}  # of each medium
_CROSSED = "cross_attention_mask"  # of tokens, images and their tiles
_KINDS = ("token_type_ids", "mm_token_type_ids")  # of tokens; models that take these want them for text too


class Batcher:
    """Pads the sequences of a batch on the right, to the longest one, and has the processor make what it has of media.

    A batch of equally long sequences gets no ``attention_mask``: nothing is padded, and transformers looks for packed
    sequences in ``position_ids`` only without one. Media are decoded here, again in each epoch: their pixels are never
    stored.

    Args:
        padding: the token id that is padded with.
        multiple: padded lengths are multiples of it, for sequences that several processes share.
        processor: the model's; ``None`` of sequences without media.
        positions: computes the positions of a packed document, in four rows: ``position_ids`` are ``[4, B, S]``.
            ``None`` of a model that counts its tokens alone; they are ``[B, S]``.
        metadata: gives what the model's towers would compute of a batch in forward, which is added to it; such as
            :class:`veomni_transformers.towers.host_metadata.HostMetadata`.
    """

    def __init__(
        self,
        padding: int,
        multiple: int = 1,
        processor: MediaProcessor | None = None,
        positions: DocumentPositions | None = None,
        metadata: Metadata | None = None,
    ) -> None:
        self._padding, self._multiple, self._processor = padding, multiple, processor
        self._positions, self._metadata = positions, metadata

    def __call__(self, sequences: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        batch = self._padded([{name: value for name, value in each.items() if name != CHAT} for each in sequences])
        if self._processor is None:
            return batch
        places = [(number, *placed) for number, each in enumerate(sequences) for placed in each.get(CHAT, ())]
        shape = batch["input_ids"].shape
        for name in _KINDS:
            if name in self._processor.loaded.model_input_names:
                batch[name] = torch.zeros(shape, dtype=torch.long)
        if places:
            self._add(batch, places, self._processor)
            if self._processor.gives_positions and "position_ids" not in batch:
                batch.setdefault("attention_mask", torch.ones(shape, dtype=torch.long))
        # Positions of packed documents are the batch's own.
        return batch if self._metadata is None else {**self._metadata(batch), **batch}

    def _padded(self, sequences: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        lengths = [len(each["input_ids"]) for each in sequences]
        longest = -(-max(lengths) // self._multiple) * self._multiple
        if all(length == longest for length in lengths):
            batch = {name: torch.stack([each[name] for each in sequences]) for name in sequences[0]}
            if self._positions is not None and "position_ids" in batch:
                batch["position_ids"] = batch["position_ids"].repeat(4, 1, 1)
            return batch
        rows = [{**each, "attention_mask": torch.ones_like(each["input_ids"])} for each in sequences]
        fill = {"input_ids": self._padding, "labels": IGNORED, "attention_mask": 0}
        return {
            name: torch.stack([pad(row[name], (0, longest - len(row[name])), value=value) for row in rows])
            for name, value in fill.items()
        }

    def _add(
        self, batch: dict[str, Tensor], places: Sequence[tuple[int, slice, MediaChat]], processor: MediaProcessor
    ) -> None:
        """Add what the processor makes of the chats in ``places``: the row and the part of it that is a chat's own."""
        chats = [chat for _, _, chat in places]
        try:
            media = [processor.decoded(chat.media) for chat in chats]
            found = processor.inputs(
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


def learned_labels(labels: Tensor) -> Tensor:
    """How many labels ``[B, S]`` a causal language model learns: it shifts them, so the first of each row is none."""
    return labels[..., 1:].ne(IGNORED).sum()
