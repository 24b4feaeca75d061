"""One document, as text and as token ids: what readers of files give, and what the packing of sequences takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from veomni_trainer.data.media.rows import MediaChat

Tokens: TypeAlias = NDArray[np.unsignedinteger]
Mask: TypeAlias = NDArray[np.bool_]
Span: TypeAlias = tuple[int, int]


@dataclass(frozen=True)
class Example:
    """A document as text, before it is tokenized.

    Attributes:
        text: all of it; of a chat, with the control tokens that its template writes.
        learned: the spans of characters, ``(start, end)``, that the loss is computed for; ``None``: all.
        ends: whether the tokenizer's end token follows. A chat's template writes its own.
    """

    text: str
    learned: tuple[Span, ...] | None = None
    ends: bool = True


@dataclass(frozen=True)
class Document:
    """A document's token ids, its end token included.

    Attributes:
        ids: ``[tokens]``.
        learned: ``[tokens]``, which tokens the loss is computed for, such as an assistant's turns; ``None``: for all.
        chat: the rendered chat and its media, of a row of a table with media.
    """

    ids: Tokens
    learned: Mask | None = None
    chat: MediaChat | None = None


def in_spans(offsets: NDArray[np.int64], spans: Sequence[Span]) -> Mask:
    """Which tokens, given the ``offsets`` ``[tokens, 2]`` of their characters, hold a character of one of ``spans``.

    Tokenizers that trim offsets put a token of white space alone behind its last character.
    """
    starts, ends = offsets[:, 0], offsets[:, 1]
    starts = np.where(starts == ends, starts - 1, starts)
    learned = np.zeros(len(offsets), np.bool_)
    for start, end in spans:
        learned |= (starts < end) & (ends > start)
    return learned
