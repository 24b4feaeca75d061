"""Tells whether two jobs train on the same sequences, from a few of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import Tensor

from veomni_trainer.data.corpus import Corpus
from veomni_trainer.data.sequences import Sequence
from veomni_trainer.data.streaming import Stream

_SAMPLES = 64


def fingerprint(corpus: Corpus) -> str:
    """The number of training sequences and a hash of some of them, as JSON.

    They are spread evenly over all, with the last among them. A text that became longer or shorter moves the boundaries
    of all sequences after it, so these differ too. Of a stream, which has no number of them, they are the first ones.
    """
    digest = hashlib.sha256()
    for sequence in _some(corpus.training):
        for _, values in sorted(sequence.items()):
            digest.update(_as_bytes(values))
    return json.dumps({"sequences": corpus.sequences, "sha256": digest.hexdigest()})


def _as_bytes(value: Any) -> bytes:
    """A tensor's numbers; of chats with media their text; what else is in a row, as JSON: text, and images' pixels."""
    if isinstance(value, list) and value and isinstance(value[0], tuple):
        return "".join(chat.text for _, chat in value).encode()
    return value.numpy().tobytes() if isinstance(value, Tensor) else json.dumps(value, default=_hash_of).encode()


def _hash_of(image: Any) -> str:
    return hashlib.sha256(image.tobytes()).hexdigest()


def _some(sequences: Any) -> Iterator[Sequence]:
    if isinstance(sequences, Stream):
        yield from sequences.first(_SAMPLES)
    else:
        for index in np.unique(np.linspace(0, len(sequences) - 1, _SAMPLES).astype(int)):
            yield sequences[int(index)]
