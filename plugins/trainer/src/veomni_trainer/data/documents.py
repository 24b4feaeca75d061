"""One tokenized document, as the readers of files give it and the packing of sequences takes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Tokens: TypeAlias = NDArray[np.unsignedinteger]
Mask: TypeAlias = NDArray[np.bool_]


@dataclass(frozen=True)
class Document:
    """A document's token ids, its end token included.

    Attributes:
        ids: ``[tokens]``.
        learned: ``[tokens]``, which tokens the loss is computed for, such as an assistant's turns; ``None``: for all.
    """

    ids: Tokens
    learned: Mask | None = None
