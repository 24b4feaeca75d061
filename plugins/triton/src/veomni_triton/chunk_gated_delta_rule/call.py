"""One call: its inputs as the kernels read them, and what follows from their shapes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from veomni_ops.triton_gpus import gpu_of, register_limit
from veomni_triton.aligned_rows import begins_aligned, compact
from veomni_triton.chunk_gated_delta_rule.launch import (
    Launch,
    Launches,
    chunk_length,
    columns,
    launches,
    padded,
    precision,
)


@dataclass(frozen=True)
class Call:
    """The inputs of a call, laid out by :func:`token_rows`.

    Attributes:
        q, k: ``[B, S, H, K]``.
        v: ``[B, S, HV, V]``.
        g, beta: ``[B, S, HV]``.
        chunks, spans: of :mod:`veomni_triton.chunk_gated_delta_rule.chunks`.
        scale: multiplies the queries.
        normed: whether queries and keys are divided by their norms.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    chunks: Tensor
    spans: Tensor
    scale: float
    normed: bool

    @classmethod
    def of(cls, inputs: Iterable[Tensor], chunks: Tensor, spans: Tensor, scale: float, normed: bool) -> Call:
        """That of the ``inputs`` q, k, v, g and beta."""
        q, k, v, g, beta = (token_rows(x) for x in inputs)
        return cls(q, k, v, g, beta, chunks, spans, scale, normed)

    @cached_property
    def heads(self) -> int:
        """Heads of queries and keys."""
        return self.q.shape[2]

    @cached_property
    def value_heads(self) -> int:
        """Heads of values."""
        return self.v.shape[2]

    @cached_property
    def widths(self) -> tuple[int, int]:
        """Of keys and of values."""
        return self.q.shape[3], self.v.shape[3]

    @cached_property
    def sizes(self) -> tuple[int, int, int, int]:
        """What kernels are told of sizes at run time: both widths, the heads of values, and how many share a key's."""
        return *self.widths, self.value_heads, self.value_heads // self.heads

    @cached_property
    def chunk(self) -> int:
        """Tokens of a chunk."""
        return chunk_length(*self.widths, self.q.dtype)

    @cached_property
    def count(self) -> int:
        """How many chunks there are."""
        return self.chunks.shape[0]

    @cached_property
    def sequences(self) -> int:
        """How many sequences there are."""
        return self.spans.shape[0]

    @cached_property
    def launches(self) -> Launches:
        """How the kernels are launched."""
        return launches(self.q.dtype, gpu_of(self.q.device).shared_bytes)

    def shared(self, launch: Launch) -> Mapping[str, Any]:
        """What every kernel is launched with."""
        return _shared(launch, *self.widths, self.q.dtype, self.q.device)

    def per_token(self, *width: int) -> Tensor:
        """A new tensor with numbers for each token and value head."""
        batch, length = self.q.shape[:2]
        return self._empty((batch, length, self.value_heads), width)

    def per_chunk(self, *shape: int) -> Tensor:
        """A new tensor with a matrix for each chunk and value head."""
        return self._empty((self.count, self.value_heads), shape)

    def _empty(self, places: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        """Matrices and rows have the dtype of the inputs, single numbers float32."""
        dtype = self.q.dtype if shape else torch.float32
        return torch.empty((*places, *shape), dtype=dtype, device=self.q.device)


@lru_cache(maxsize=256)
def _shared(
    launch: Launch, key_width: int, value_width: int, dtype: torch.dtype, device: torch.device
) -> Mapping[str, Any]:
    return MappingProxyType(
        {
            "C": chunk_length(key_width, value_width, dtype),
            "K": padded(key_width),
            "V": columns(launch, value_width),
            "PRECISION": precision(dtype),
            "num_warps": launch.warps,
            "num_stages": launch.stages,
            **register_limit(device, launch.registers),
        }
    )


def token_rows(x: Tensor) -> Tensor:
    """``x [B, S, ...]`` with a dense last dimension, and aligned tokens that are equally far apart; or a copy."""
    batch, length = x.shape[:2]
    is_dense = x.dim() == 3 or x.stride(-1) == 1 or x.shape[-1] == 1
    is_regular = batch == 1 or length == 0 or x.stride(0) == length * x.stride(1)
    is_aligned = x.dim() == 3 or begins_aligned(x)  # single numbers are not loaded several at a time
    return x if is_dense and is_regular and is_aligned else compact(x)
