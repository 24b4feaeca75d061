"""What a row carries on its way, and where in the row: one buffer of bytes, and so one collective."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_ALIGNMENT = 16  # bytes: what TMA and vector loads ask of a row's start


@dataclass(frozen=True)
class RowLayout:
    """A row of ``width`` hidden values, ``choices`` routing weights and, on the way there, as many local expert ids.

    Example:
        >>> layout = RowLayout(2048, torch.bfloat16, 8, torch.bfloat16)
        >>> layout.bytes
        4144
    """

    width: int
    dtype: torch.dtype
    choices: int
    weights_dtype: torch.dtype
    has_ids: bool = True

    @property
    def bytes(self) -> int:
        """The length of a row."""
        return self._ids_start + (_aligned(4 * self.choices) if self.has_ids else 0)

    def empty(self, rows: int, device: torch.device) -> Tensor:
        """A buffer of so many rows, ``[rows, bytes]``."""
        return torch.empty(rows, self.bytes, dtype=torch.uint8, device=device)

    def hidden(self, buffer: Tensor) -> Tensor:
        """The hidden values ``[rows, width]``: a view of the buffer, as the next two."""
        return self._part(buffer, 0, self.dtype, self.width)

    def weights(self, buffer: Tensor) -> Tensor:
        """The routing weights ``[rows, choices]``."""
        return self._part(buffer, self._weights_start, self.weights_dtype, self.choices)

    def ids(self, buffer: Tensor) -> Tensor:
        """The local expert ids ``[rows, choices]``, int32."""
        return self._part(buffer, self._ids_start, torch.int32, self.choices)

    @property
    def _weights_start(self) -> int:
        return _aligned(self.width * self.dtype.itemsize)

    @property
    def _ids_start(self) -> int:
        return self._weights_start + _aligned(self.choices * self.weights_dtype.itemsize)

    def _part(self, buffer: Tensor, start: int, dtype: torch.dtype, count: int) -> Tensor:
        first = start // dtype.itemsize
        return buffer.view(dtype)[:, first : first + count]


def _aligned(length: int) -> int:
    return -(-length // _ALIGNMENT) * _ALIGNMENT
