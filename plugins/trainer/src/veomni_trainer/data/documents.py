"""One document, as text and as token ids: what readers of files give, and what the packing of sequences takes."""

from __future__ import annotations

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
