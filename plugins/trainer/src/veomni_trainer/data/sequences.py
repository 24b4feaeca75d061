"""The three ways in which tokenized documents become sequences: joined text, one document each, or packed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from veomni_core.errors import JobFileError
from veomni_core.kernels import IGNORED
from veomni_trainer.data.batches import CHAT
from veomni_trainer.data.documents import Mask
from veomni_trainer.data.packing import Indices, Pieces, pack
from veomni_trainer.data.token_store import TokenStore

Sequence = dict[str, Any]  # of tensors; and where there are chats with media, each with its part of the tokens


class Sequences(Dataset[Sequence]):
    """Sequences as inputs of a causal language model; the model itself shifts the labels."""

    def __init__(self, store: TokenStore, length: int) -> None:
        self._store, self._length = store, length

    def __len__(self) -> int:
        raise NotImplementedError

    def learned(self, chosen: Mask | None = None) -> int:
        """How many labels are learned of all sequences, or of those in the mask ``chosen`` ``[sequences]``."""
        raise NotImplementedError

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

    def __len__(self) -> int:
        return len(self._store.ids) // self._length

    def learned(self, chosen: Mask | None = None) -> int:
        return (len(self) if chosen is None else int(chosen.sum())) * (self._length - 1)

    def _sequence(self, index: int) -> Sequence:
        ids, labels = self._tokens(index * self._length, self._length)
        return {"input_ids": ids, "labels": labels}


class SingleDocuments(Sequences):
    """One document per sequence; a longer one is cut off. One with media has its chat too, as in packed ones.

    Args:
        store: the documents.
        length: of a sequence, at most.
        kept: the numbers of the documents that are sequences; by default all.
    """

    def __init__(self, store: TokenStore, length: int, kept: Indices | None = None) -> None:
        super().__init__(store, length)
        self._kept = np.arange(len(store.ends)) if kept is None else kept
        self._pieces = Pieces.of(store.starts[self._kept], store.ends[self._kept], length, split=False)

    def __len__(self) -> int:
        return len(self._pieces.starts)

    def learned(self, chosen: Mask | None = None) -> int:
        labels = learned_in(self._store, self._pieces)
        return int(labels.sum() if chosen is None else labels[chosen].sum())

    def _sequence(self, index: int) -> Sequence:
        ids, labels = self._tokens(int(self._pieces.starts[index]), int(self._pieces.lengths[index]))
        chat = self._store.chats[int(self._kept[index])] if self._store.chats is not None else None
        return {"input_ids": ids, "labels": labels, **({} if chat is None else {CHAT: [(slice(0, len(ids)), chat)]})}


class PackedDocuments(Sequences):
    """Several documents per sequence. ``position_ids`` restart at each, and the first token of each is not learned.

    What is left of a sequence is filled with ``padding``, as a document of its own that is not learned. Where some have
    media, ``chat`` has their chats, each with the slice of the sequence that is its own.

    Args:
        store: the documents.
        length: of a sequence.
        padding: the token that fills it.
        seed: decides which documents share a sequence.
        kept: as of :class:`SingleDocuments`.
    """

    def __init__(self, store: TokenStore, length: int, padding: int, seed: int, kept: Indices | None = None) -> None:
        super().__init__(store, length)
        self._padding = padding
        self._kept = np.arange(len(store.ends)) if kept is None else kept
        split = store.learned is None and store.chats is None
        self._pieces = Pieces.of(store.starts[self._kept], store.ends[self._kept], length, split=split)
        self._packs = pack(self._pieces.lengths, length, seed)

    @property
    def fill_rate(self) -> float:
        """The part of the sequences' tokens that comes from documents."""
        return float(self._pieces.lengths.sum()) / (len(self) * self._length)

    def __len__(self) -> int:
        return len(self._packs)

    def learned(self, chosen: Mask | None = None) -> int:
        labels = learned_in(self._store, self._pieces)
        if chosen is None:
            return int(labels.sum())
        return sum(int(labels[self._packs[int(index)]].sum()) for index in np.flatnonzero(chosen))

    def _sequence(self, index: int) -> Sequence:
        ids, labels = (torch.full((self._length,), value) for value in (self._padding, IGNORED))
        positions, at = torch.zeros(self._length, dtype=torch.long), 0
        chats = []
        for piece in self._packs[index]:
            start, length = int(self._pieces.starts[piece]), int(self._pieces.lengths[piece])
            span = slice(at, at + length)
            ids[span], labels[span] = self._tokens(start, length)
            labels[at] = IGNORED
            positions[span] = torch.arange(length)
            at += length
            if self._store.chats is not None and (chat := self._store.chats[int(self._kept[piece])]) is not None:
                chats.append((span, chat))
        positions[at:] = torch.arange(self._length - at)
        return {"input_ids": ids, "labels": labels, "position_ids": positions, **({CHAT: chats} if chats else {})}


@dataclass(frozen=True)
class Counts:
    """What became of the tokens.

    Attributes:
        tokens: how many were read.
        sequences: how many sequences they are, those for validation included.
        left_over: how many at the end are too few for one more sequence.
        truncated: how many documents were cut off.
        fill_rate: of packed sequences, the part that is not padding.
        learned: how many labels are learned.
        learned_whole: how many would be, if no document were cut off.
        media_cut_off: how many documents were left out, since their media would be cut off.
    """

    tokens: int
    sequences: int
    left_over: int = 0
    truncated: int = 0
    fill_rate: float | None = None
    learned: int = 0
    learned_whole: int = 0
    media_cut_off: int = 0

    def describe(self) -> str:
        """``6 tokens, 3 sequences, 0 tokens left over``."""
        words = [f"{self.tokens:,} tokens", f"{self.sequences:,} sequences"]
        if self.fill_rate is not None:
            words.append(f"{self.fill_rate:.1%} full")
        if self.truncated:
            words.append(f"{self.truncated:,} documents cut off at data.sequence_length")
        if self.media_cut_off:
            words.append(f"{self.media_cut_off:,} rows left out, whose media end after data.sequence_length")
        if self.learned < self.learned_whole:
            words.append(f"{self.learned:,} of {self.learned_whole:,} learned tokens left")
        if self.left_over:
            words.append(f"{self.left_over:,} tokens left over")
        return ", ".join(words)


def arrange(
    store: TokenStore, length: int, packing: bool, padding: int, seed: int, skips_media: bool = False
) -> tuple[Sequences, Counts]:
    """The documents of ``store`` as sequences of at most ``length``.

    A document whose media would be cut off is an error, or left out if ``skips_media``. Without ``packing``, documents
    of which everything is learned are text and joined; others get a sequence each.
    """
    sequences: Sequences
    counts, kept = Counts(len(store.ids), 0), None
    if store.chats is not None:
        kept = _with_whole_media(store, length, skips_media)
        counts = replace(counts, media_cut_off=len(store.ends) - len(kept))
    if packing:
        packed = sequences = PackedDocuments(store, length, padding, seed, kept)
        counts = replace(counts, fill_rate=packed.fill_rate if len(packed) else 0.0)
    elif store.learned is None and store.chats is None:
        sequences = JoinedText(store, length)
        counts = replace(counts, left_over=len(store.ids) % length)
    else:
        sequences = SingleDocuments(store, length, kept)
    whole = learned = sequences.learned()
    if store.learned is not None:
        counts = replace(counts, truncated=int((store.ends - store.starts > length).sum()))
    if counts.truncated:
        whole = int(learned_in(store, Pieces(store.starts, store.ends - store.starts)).sum())
    return sequences, replace(counts, sequences=len(sequences), learned=learned, learned_whole=whole)


def _with_whole_media(store: TokenStore, length: int, skips: bool) -> Indices:
    """The documents whose media are within ``length`` tokens.

    Raises:
        JobFileError: the others are not to be left out.
    """
    assert store.chats is not None
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
