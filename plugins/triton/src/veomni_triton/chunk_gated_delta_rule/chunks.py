"""How the sequences of a call are cut into chunks: two small tables that the kernels read.

Tokens of all rows of a batch are numbered through. No chunk has tokens of two sequences.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor


def most_chunks(batch: int, length: int, sequences: int | None, chunk: int) -> int:
    """How many chunks a call has at most, by its shapes alone.

    Args:
        batch: rows.
        length: tokens of a row.
        sequences: how many are packed into the one row; ``None`` if each row is one.
        chunk: tokens of a whole chunk.
    """
    # Each packed sequence may end in a chunk that is not whole.
    return batch * -(-length // chunk) if sequences is None else length // chunk + sequences


@lru_cache(maxsize=64)
def tables_of_rows(batch: int, length: int, chunk: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The tables of a batch whose rows are sequences; see :func:`tables`."""
    return tables(pairwise(range(0, (batch + 1) * length, length) if length else (0,) * (batch + 1)), chunk, device)


def tables(
    bounds: Iterable[tuple[int, int]], chunk: int, device: torch.device, padded_to: int = 0
) -> tuple[Tensor, Tensor]:
    """Chunks and spans of sequences that begin and end at ``bounds``.

    Returns:
        Chunks ``[N, 2]``, first token and number of tokens, and spans ``[sequences, 2]``, the first chunk of a sequence
        and the one after its last. Both int32 on the device. Chunks from the last one to ``padded_to`` have no tokens.
    """
    chunks: list[Sequence[int]] = []
    spans: list[Sequence[int]] = []
    for begin, end in bounds:
        spans.append((len(chunks), len(chunks) + -(-(end - begin) // chunk)))
        chunks += [(first, min(chunk, end - first)) for first in range(begin, end, chunk)]
    chunks += [(0, 0)] * (padded_to - len(chunks))
    # One copy to the device for both, which is over on return: a table that is kept serves other streams too.
    table = torch.tensor([*chunks, *spans], dtype=torch.int32).reshape(-1, 2).to(device)
    return table[: len(chunks)], table[len(chunks) :]
