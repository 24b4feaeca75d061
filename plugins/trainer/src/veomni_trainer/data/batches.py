"""Puts sequences together into a batch, and counts what the loss learns from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from veomni_core.kernels import IGNORED

CHAT = "chat"  # under which a sequence has its chats with media, for what makes batches, each with its slice


class Batcher:
    """Pads the sequences of a batch on the right, to the longest one.

    A batch of equally long sequences gets no ``attention_mask``: nothing is padded, and transformers looks for packed
    sequences in ``position_ids`` only without one.

    Args:
        padding: the token id that is padded with.
        multiple: padded lengths are multiples of it, for sequences that several processes share.
        rows: of the positions of packed sequences: ``position_ids`` are ``[rows, B, S]``, or of one row ``[B, S]``.
    """

    def __init__(self, padding: int, multiple: int = 1, rows: int = 1) -> None:
        self._padding, self._multiple, self._rows = padding, multiple, rows

    def __call__(self, sequences: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        lengths = [len(each["input_ids"]) for each in sequences]
        longest = -(-max(lengths) // self._multiple) * self._multiple
        if all(length == longest for length in lengths):
            batch = {name: torch.stack([each[name] for each in sequences]) for name in sequences[0]}
            if self._rows > 1 and "position_ids" in batch:
                batch["position_ids"] = batch["position_ids"].repeat(self._rows, 1, 1)
            return batch
        rows = [{**each, "attention_mask": torch.ones_like(each["input_ids"])} for each in sequences]
        fill = {"input_ids": self._padding, "labels": IGNORED, "attention_mask": 0}
        return {
            name: torch.stack([pad(row[name], (0, longest - len(row[name])), value=value) for row in rows])
            for name, value in fill.items()
        }


def learned_labels(labels: Tensor) -> Tensor:
    """How many labels ``[B, S]`` a causal language model learns: it shifts them, so the first of each row is none."""
    return labels[..., 1:].ne(IGNORED).sum()
