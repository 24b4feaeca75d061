"""The three ways in which tokenized documents become sequences: joined text, one document each, or packed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from veomni_core.errors import JobFileError
from veomni_core.kernels import IGNORED
from veomni_trainer.data.batches import CHAT
from veomni_trainer.data.packing import Indices, Pieces, pack
from veomni_trainer.data.reading import Reading
from veomni_trainer.data.token_store import TokenStore

Sequence = dict[str, Any]  # of tensors; and where there are chats with media, each with its part of the tokens


class Sequences(Dataset[Sequence]):
    """Sequences as inputs of a causal language model; the model itself shifts the labels.

    Attributes:
        learned: ``[sequences]``: how many labels are learned of each.
        fill_rate: of packed sequences, the part of the tokens that comes from documents.
    """

    learned: Indices
    fill_rate: float | None = None

    def __init__(self, store: TokenStore, length: int) -> None:
        self._store, self._length = store, length

    def __len__(self) -> int:
        return len(self.learned)

    def __getitem__(self, index: int) -> Sequence:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self._sequence(int(index))

    def __iter__(self) -> Iterator[Sequence]:
        return (self[index] for index in range(len(self)))

    def _sequence(self, index: int) -> Sequence:
        raise NotImplementedError

    def _tokens(self, start: int, length: int) -> tuple[Tensor, Tensor]:
        """The ids and labels of a span."""
        span = slice(start, start + length)
        ids = torch.from_numpy(self._store.ids[span].astype(np.int64))
        if self._store.learned is None:
            return ids, ids.clone()
        return ids, ids.masked_fill(~torch.from_numpy(self._store.learned[span].copy()), IGNORED)


class JoinedText(Sequences):
    """All documents one after the other, divided into sequences of ``length``; the last tokens are left over."""

    def __init__(self, store: TokenStore, length: int) -> None:
        super().__init__(store, length)
        self.learned = np.broadcast_to(np.int64(length - 1), len(store.ids) // length)  # one number in memory

    def _sequence(self, index: int) -> Sequence:
        ids, labels = self._tokens(index * self._length, self._length)
        return {"input_ids": ids, "labels": labels}


class Documents(Sequences):
    """One document per sequence, or several if they are packed; a longer one is cut off, or split if it is packed text.

    Packed, ``position_ids`` restart at each, and the first token of each is not learned; what is left of a sequence is
    filled with ``padding``, as a document of its own that is not learned. Where some have media, ``chat`` has their
    chats, each with the slice of the sequence that is its own.

    Args:
        store: the documents.
        length: of a sequence, at most.
        kept: the numbers of the documents that are in sequences.
        packing: whether several share a sequence.
        padding: the token that fills it.
        seed: decides which documents share a sequence.
    """

    def __init__(
        self, store: TokenStore, length: int, kept: Indices, packing: bool, padding: int = 0, seed: int = 0
    ) -> None:
        super().__init__(store, length)
        self._kept, self._padding = kept, padding
        split = packing and store.learned is None and store.chats is None
        self._pieces = Pieces.of(store.starts[kept], store.ends[kept], length, split=split)
        self._packs = pack(self._pieces.lengths, length, seed) if packing else None
        self.learned = learned_in(store, self._pieces)
        if self._packs is not None:
            self.learned = self._packs.sums(self.learned)
            tokens, there = len(self) * length, float(self._pieces.lengths.sum())
            self.fill_rate = there / tokens if tokens else 0.0

    def _sequence(self, index: int) -> Sequence:
        if self._packs is None:
            ids, labels = self._piece(index)
            return {"input_ids": ids, "labels": labels, **self._chats([(slice(0, len(ids)), index)])}
        ids, labels = (torch.full((self._length,), value) for value in (self._padding, IGNORED))
        positions, at = torch.zeros(self._length, dtype=torch.long), 0
        spans = []
        for piece in self._packs[index].tolist():
            span = slice(at, at + int(self._pieces.lengths[piece]))
            ids[span], labels[span] = self._piece(piece)
            labels[at] = IGNORED
            positions[span] = torch.arange(span.stop - at)
            spans.append((span, piece))
            at = span.stop
        positions[at:] = torch.arange(self._length - at)
        return {"input_ids": ids, "labels": labels, "position_ids": positions, **self._chats(spans)}

    def _piece(self, piece: int) -> tuple[Tensor, Tensor]:
        return self._tokens(int(self._pieces.starts[piece]), int(self._pieces.lengths[piece]))

    def _chats(self, spans: list[tuple[slice, int]]) -> Sequence:
        """The chats of a sequence's pieces, where some have media; each piece is a document then."""
        if self._store.chats is None:
            return {}
        found = [(span, self._store.chats[int(self._kept[piece])]) for span, piece in spans]
        chats = [(span, chat) for span, chat in found if chat is not None]
        return {CHAT: chats} if chats else {}


def arrange(
    store: TokenStore, length: int, packing: bool, padding: int, seed: int, skips_media: bool = False
) -> tuple[Sequences, Reading]:
    """The documents of ``store`` as sequences of at most ``length``, and what was read with the counts of these.

    A document whose media would be cut off is an error, or left out if ``skips_media``. Without ``packing``, documents
    of which everything is learned are text and joined; others get a sequence each.
    """
    sequences: Sequences
    left_over, kept = 0, _with_whole_media(store, length, skips_media)
    if packing or store.learned is not None or store.chats is not None:
        sequences = Documents(store, length, kept, packing, padding, seed)
    else:
        sequences, left_over = JoinedText(store, length), len(store.ids) % length
    whole = learned = int(sequences.learned.sum())
    truncated = 0 if store.learned is None else int((store.ends - store.starts > length).sum())
    if truncated:
        whole = int(learned_in(store, Pieces(store.starts, store.ends - store.starts)).sum())
    return sequences, replace(
        store.reading,
        tokens=len(store.ids),
        sequences=len(sequences),
        training=len(sequences),
        left_over=left_over,
        truncated=truncated,
        fill_rate=sequences.fill_rate,
        learned=learned,
        learned_whole=whole,
        media_cut_off=len(store.ends) - len(kept),
    )


def _with_whole_media(store: TokenStore, length: int, skips: bool) -> Indices:
    """The numbers of the documents whose media are within ``length`` tokens.

    Raises:
        JobFileError: the others are not to be left out.
    """
    if store.chats is None:
        return np.arange(len(store.ends))
    kept = []
    for number, chat in enumerate(store.chats):
        if chat is None or chat.last <= length:
            kept.append(number)
        elif not skips:
            raise JobFileError(
                f"{chat.origin}: its media end at token {chat.last:,}, and data.sequence_length is {length:,}, which "
                "would cut them off. Raise it, lower data.image_pixels, or write data.media_errors: skip"
            )
    return np.asarray(kept, np.int64)


def learned_in(store: TokenStore, pieces: Pieces) -> Indices:
    """``[pieces]``: how many labels are learned of each. Its first token is the label of none."""
    if store.learned is None:
        return np.maximum(pieces.lengths - 1, 0)
    learned, counts = np.asarray(store.learned), np.zeros(len(pieces.starts), np.int64)
    for number, (start, length) in enumerate(zip(pieces.starts, pieces.lengths, strict=True)):
        counts[number] = np.count_nonzero(learned[start + 1 : start + length])
    return counts
