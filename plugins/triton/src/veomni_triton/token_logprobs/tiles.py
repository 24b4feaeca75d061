"""How a vocabulary is cut into tiles of logits, and which of them are kept for backward.

Shape suffixes: ``N`` tokens, ``W`` words of a tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

# A tile of 8192 tokens has as many words in bf16.
TILE_BYTES = 128 << 20
# No tile has fewer, however many tokens there are: a tile of 512 words is smaller than the hidden states themselves.
FEWEST_WORDS = 512
# Tiles have a multiple of these words, so that their rows begin at addresses that matrix products read fast.
ALIGNMENT = 256
# As many words are a program's at a time. Where tiles have a multiple, a token's sums don't depend on where they end.
COLUMNS = 2048


@dataclass(frozen=True)
class Tiles:
    """How a vocabulary is cut into tiles of ``words``, of which those from the word ``first_kept`` on are kept."""

    tokens: int
    vocabulary: int
    words: int
    first_kept: int

    @classmethod
    def of(cls, hidden: Tensor, vocabulary: int, kept_bytes: int, in_fixed_order: bool = False) -> Tiles:
        """The same in forward and backward, where ``kept_bytes`` are those that were kept."""
        bytes_per_word = max(1, hidden.shape[0]) * hidden.element_size()
        fewest, multiple = (COLUMNS, COLUMNS) if in_fixed_order else (FEWEST_WORDS, ALIGNMENT)
        words = min(vocabulary, max(fewest, TILE_BYTES // bytes_per_word // multiple * multiple))
        # The last tile may be smaller; the word that is kept first begins a tile.
        first_kept = max(0, -(-(vocabulary - kept_bytes // bytes_per_word) // words) * words)
        return cls(hidden.shape[0], vocabulary, words, min(first_kept, vocabulary))

    @property
    def kept_elements(self) -> int:
        """The number of logits of all tiles that are kept."""
        return self.tokens * (self.vocabulary - self.first_kept)

    def __iter__(self) -> Iterator[slice]:
        for start in range(0, self.vocabulary, self.words):
            yield slice(start, min(start + self.words, self.vocabulary))

    def view(self, kept: Tensor, words: slice) -> Tensor:
        """The tile ``[N, W]`` of ``words`` among the kept ones, which lie one after the other."""
        return matrix(kept[self.tokens * (words.start - self.first_kept) :], self.tokens, words)


def matrix(elements: Tensor, tokens: int, words: slice) -> Tensor:
    """The first of ``elements`` as a tile ``[N, W]``."""
    width = words.stop - words.start
    return elements[: tokens * width].view(tokens, width)
