"""The sums of each token over all tiles: where they begin, and what they say at the end."""

from __future__ import annotations

import torch
from torch import Tensor

from veomni_ops.token_logprobs import ENTROPY, LOG_SUM_SQUARES, LOGPROBS, MEAN_LOGIT
from veomni_triton.token_logprobs.kernels import (
    BEFORE_LABEL,
    LARGEST,
    OF_LABEL,
    PLAIN,
    SQUARES,
    SUMS,
    TOTAL,
    WEIGHTED,
)


def sums_of_nothing(tokens: int, device: torch.device) -> Tensor:
    """``sums[SUMS, N]`` before the first tile, in float32."""
    sums = torch.zeros(SUMS, tokens, dtype=torch.float32, device=device)
    # Finite: the kernel subtracts it from the largest logit of the first tile.
    sums[LARGEST.value].fill_(torch.finfo(torch.float32).min)
    sums[BEFORE_LABEL.value].fill_(-torch.inf)
    return sums


class Statistics:
    """The outputs ``[N]`` of the ``sums[SUMS, N]`` after the last tile, in float32."""

    def __init__(self, sums: Tensor, vocabulary: int) -> None:
        self._sums, self._vocabulary = sums, vocabulary

    def log_normalizer(self) -> Tensor:
        """The logarithm of the sum of the exponentials of a token's logits."""
        return self._sums[LARGEST.value] + self._sums[TOTAL.value].log()

    def of(self, name: str) -> Tensor:
        """One of the op's outputs, as if every label counted."""
        largest, total, of_label = (self._sums[row.value] for row in (LARGEST, TOTAL, OF_LABEL))
        if name == LOGPROBS:
            return (of_label - largest) - total.log()
        if name == ENTROPY:
            return total.log() - self._sums[WEIGHTED.value] / total
        if name == LOG_SUM_SQUARES:
            return self._sums[SQUARES.value].log() - 2 * total.log()
        if name == MEAN_LOGIT:
            return self._sums[PLAIN.value] / self._vocabulary
        return ((of_label >= largest) & (of_label > self._sums[BEFORE_LABEL.value])).float()
