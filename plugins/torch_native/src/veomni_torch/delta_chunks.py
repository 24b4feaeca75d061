"""How a batch, or packed sequences, are cut into chunks of tokens, and how tensors are read and written by chunks.

Shape suffixes: ``B`` batch, ``S`` sequence, ``H`` heads, ``N`` chunks, ``C`` tokens of a chunk, ``D`` a width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 64
# Numbers in one group of chunks, of one tensor as large as the values: a group's temporaries are about twenty of them.
# An accelerator needs more of them, to be busy.
_CPU_GROUP, _ACCELERATOR_GROUP = 1 << 17, 1 << 22


@dataclass(frozen=True)
class Chunks:
    """Chunks of all sequences, one sequence's after another's; the last chunk of a sequence is filled up.

    Attributes:
        tokens: ``[N, C]``, which token of S each is; any where ``real`` is False.
        real: ``[N, C]``, False where a chunk is filled up.
        places: ``[S]``, where each token is among the flattened ``[N * C]``.
        firsts: the first token of each chunk, and S.
        spans: the first chunk of each sequence, and the one after its last. An empty sequence has none.
        is_packed: whether the sequences are in one row of the batch, or each row of it is one.
    """

    tokens: Tensor
    real: Tensor
    places: Tensor
    firsts: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    is_packed: bool

    @property
    def count(self) -> int:
        """How many chunks there are."""
        return self.tokens.shape[0]

    def groups(self, numbers_of_a_chunk: int) -> Iterator[slice]:
        """Neighbouring chunks that are computed together, as many as keep temporaries small."""
        budget = _CPU_GROUP if self.tokens.device.type == "cpu" else _ACCELERATOR_GROUP
        size = max(1, budget // max(1, numbers_of_a_chunk))
        for first in range(0, self.count, size):
            yield slice(first, min(first + size, self.count))

    def starts(self) -> dict[int, slice]:
        """By the first chunk of a sequence, the rows of the states that are its own."""
        return {first: self._rows(index) for index, (first, last) in enumerate(self.spans) if last > first}

    def ends(self) -> dict[int, slice]:
        """By the last chunk of a sequence, the rows of the states that are its own."""
        return {last - 1: self._rows(index) for index, (first, last) in enumerate(self.spans) if last > first}

    def _rows(self, index: int) -> slice:
        return slice(index, index + 1) if self.is_packed else slice(None)

    def read(self, x_BSH: Tensor, group: slice, dtype: torch.dtype) -> Tensor:
        """The group's part of ``[B, S, H]`` as ``[B, H, N, C]``, or of ``[B, S, H, D]`` as ``[B, H, N, C, D]``.

        It is 0 where a chunk is filled up.
        """
        tokens, real = self.tokens[group], self.real[group]
        picked = x_BSH.index_select(1, tokens.flatten()).unflatten(1, tokens.shape).movedim(3, 1).to(dtype)
        filled = ~real if x_BSH.dim() == 3 else ~real.unsqueeze(-1)
        return picked.masked_fill(filled, 0.0).contiguous()

    def write(self, into_BSH: Tensor, x_BHNC: Tensor, group: slice) -> None:
        """Write the group's part, as :meth:`read` gives it, into ``[B, S, H]`` or ``[B, S, H, D]``."""
        flat = x_BHNC.movedim(1, 3).flatten(1, 2).to(into_BSH.dtype)
        tokens = slice(self.firsts[group.start], self.firsts[group.stop])
        into_BSH[:, tokens] = flat.index_select(1, self.places[tokens] - group.start * self.tokens.shape[1])


def cut(length: int, bounds: Sequence[tuple[int, int]] | None, device: torch.device) -> Chunks:
    """The chunks of rows of ``length`` tokens, or of packed sequences with ``bounds``."""
    longest = max([last - first for first, last in bounds or ((0, length),)])
    chunk = next(size for size in (8, 16, 32, CHUNK) if size >= min(longest, CHUNK))
    firsts: list[int] = []
    lengths: list[int] = []
    spans = []
    for first, last in bounds or ((0, length),):
        begun = list(range(first, last, chunk))
        spans.append((len(firsts), len(firsts) + len(begun)))
        firsts += begun
        lengths += [min(chunk, last - each) for each in begun]
    starts, counts = (torch.tensor(each, dtype=torch.long, device=device) for each in (firsts, lengths))
    within = torch.arange(chunk, device=device)
    real = within < counts.unsqueeze(1)
    tokens = torch.where(real, starts.unsqueeze(1) + within, 0)
    filled_up = torch.arange(len(firsts), device=device) * chunk - starts  # places before each chunk that no token has
    places = torch.arange(length, device=device) + filled_up.repeat_interleave(counts, output_size=length)
    return Chunks(tokens, real, places, (*firsts, length), tuple(spans), bounds is not None)
