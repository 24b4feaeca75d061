"""A job's text as token sequences of equal length, held in memory and split into training and validation."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.data import Dataset

from veomni_core.errors import JobFileError
from veomni_trainer.data.documents import Tokens
from veomni_trainer.data.read import read_documents
from veomni_trainer.data.reading import Reading
from veomni_trainer.data.tokens import Tokenizer
from veomni_trainer.job.data_section import DataSection


class Sequences(Dataset[dict[str, torch.Tensor]]):
    """The rows of a token table as inputs of a causal language model; the model itself shifts the labels."""

    def __init__(self, rows: Tokens) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = torch.from_numpy(self._rows[index].astype(np.int64))
        return {"input_ids": row, "labels": row}


@dataclass(frozen=True)
class Corpus:
    """The sequences that were read. ``unused``: the number of tokens at the end, too few for one more sequence."""

    training: Sequences
    validation: Sequences
    tokens: int
    unused: int
    readings: tuple[Reading, ...]

    def describe(self) -> str:
        """One line for the terminal."""
        held_out = f", {len(self.validation):,} of them for validation" if len(self.validation) else ""
        return (
            f"data: {'; '.join(reading.describe() for reading in self.readings)}; {self.tokens:,} tokens, "
            f"{len(self.training) + len(self.validation):,} sequences{held_out}, {self.unused:,} tokens left over"
        )


def read_corpus(data: DataSection, tokenizer: Tokenizer) -> Corpus:
    """Read and tokenize the documents that ``data`` names, join them, and split them into sequences.

    Raises:
        JobFileError: there is nothing to read, a file is unreadable, or there are fewer tokens than one sequence.
    """
    readings = tuple(Reading(key) for key in data.training_sources)
    pieces = []
    for source, reading in zip(data.training_sources.values(), readings, strict=True):
        pieces += [document.ids for document in read_documents(source, tokenizer, reading)]
    tokens = np.concatenate(pieces)
    length = data.sequence_length
    count = len(tokens) // length
    if count == 0:
        raise JobFileError(
            f"data.files: {len(tokens):,} tokens are fewer than one sequence of {length:,} (data.sequence_length)"
        )
    rows = tokens[: count * length].reshape(count, length)
    held_out = _held_out(count, data.validation_fraction)
    training = rows[~held_out] if held_out.any() else rows
    return Corpus(Sequences(training), Sequences(rows[held_out]), len(tokens), len(tokens) % length, readings)


def _held_out(count: int, fraction: float) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """A mask ``[count]`` of the rows for validation: evenly spaced, so that every part of the text is in both sets."""
    mask = np.zeros(count, np.bool_)
    chosen = round(count * fraction)
    if fraction and not 0 < chosen < count:
        raise JobFileError(
            f"data.validation_fraction: {fraction} of {count} sequences leaves none to train on or none to validate"
        )
    mask[((np.arange(chosen) + 0.5) * count / max(chosen, 1)).astype(int)] = True
    return mask
