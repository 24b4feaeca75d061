"""One call: its inputs as the kernels read them, and what follows from their shapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from veomni_ops.sizes import ceil_div
from veomni_ops.triton_gpus import gpu_of, register_limit
from veomni_triton.aligned_rows import begins_aligned, compact
from veomni_triton.mamba2_scan.launch import Launch, Launches, launches, operand_dtype, slice_of_heads, tile


@dataclass(frozen=True)
class Call:
    """The inputs of a call, those of more than one number a token laid out by :func:`token_rows`.

    Attributes:
        x: ``[B, S, H, P]``.
        dt: ``[B, S, H]``.
        A, D, bias: ``[H]``.
        B, C: ``[B, S, G, N]``.
        seq_idx: ``[B, S]``.
        softplus: whether time steps are that of ``dt``.
        least, most: time step.
    """

    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None
    bias: Tensor | None
    seq_idx: Tensor | None
    softplus: bool
    least: float
    most: float

    def laid_out(self) -> Call:
        """The same call, with tensors as the kernels read them, and those of tiles in the dtype of products."""
        tiles = {name: getattr(self, name) for name in ("x", "B", "C")}
        dtype = operand_dtype(*self.widths, *(each.dtype for each in tiles.values()))
        laid_out: dict[str, Any] = {name: token_rows(each.to(dtype)) for name, each in tiles.items()}
        for name in ("A", "D", "bias"):
            laid_out[name] = None if (vector := getattr(self, name)) is None else vector.contiguous()
        return replace(self, **laid_out)

    @cached_property
    def batch(self) -> int:
        """Rows."""
        return self.x.shape[0]

    @cached_property
    def length(self) -> int:
        """Tokens of a row."""
        return self.x.shape[1]

    @cached_property
    def heads(self) -> int:
        """Heads."""
        return self.x.shape[2]

    @cached_property
    def groups(self) -> int:
        """Groups of heads with one B and C."""
        return self.B.shape[2]

    @cached_property
    def widths(self) -> tuple[int, int]:
        """Of a head, and of a state."""
        return self.x.shape[3], self.B.shape[3]

    @cached_property
    def launches(self) -> Launches:
        """How the kernels are launched."""
        return launches(self.x.dtype, gpu_of(self.x.device).shared_bytes)

    @cached_property
    def chunks(self) -> int:
        """Chunks of a row."""
        return ceil_div(self.length, self.launches.chunk)

    @cached_property
    def places(self) -> int:
        """Chunks of all rows."""
        return self.batch * self.chunks

    @cached_property
    def sizes(self) -> tuple[int, int, int, int]:
        """The sizes that kernels take at run time."""
        return self.length, self.chunks, self.heads, self.groups

    def slice(self, launch: Launch) -> int:
        """The heads that one program adds up."""
        return slice_of_heads(self.heads // self.groups, launch.heads)

    def tiles(self, launch: Launch) -> tuple[int, int]:
        """How many tiles cover a head, and a state."""
        (width, state), (P, N) = self.widths, self._columns(launch)
        return ceil_div(width, P), ceil_div(state, N)

    def shared(self, launch: Launch) -> Mapping[str, Any]:
        """What every kernel of tiles is launched with."""
        (width, state), (P, N) = self.widths, self._columns(launch)
        return {"WIDTH": width, "P": P, **self.of_states(launch), "STATE": state, "N": N}

    def of_states(self, launch: Launch) -> Mapping[str, Any]:
        """The same, of a kernel which no head's width concerns."""
        return {
            "STATE": self.widths[1],
            "L": self.launches.chunk,
            "N": self._columns(launch)[1],
            "PRECISION": "ieee" if self.x.dtype == torch.float32 else "tf32",
            "num_warps": launch.warps,
            "num_stages": launch.stages,
            **register_limit(self.x.device, launch.registers),
        }

    def _columns(self, launch: Launch) -> tuple[int, int]:
        width, state = self.widths
        return tile(launch.columns, width), tile(launch.states, state)

    def per_token(self, *first: int) -> Tensor:
        """A new tensor with a float32 number for each token and head, chunk by chunk."""
        shape = (*first, self.batch, self.heads, self.chunks, self.launches.chunk)
        return self.x.new_empty(shape, dtype=torch.float32)

    def per_place(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """A new tensor for each chunk of each row."""
        return self.x.new_empty((self.batch, self.chunks, *shape), dtype=dtype)

    def states(self) -> Tensor:
        """A new tensor with a state for each chunk and head."""
        return self.per_place(self.heads, *self.widths, dtype=self.x.dtype)


def token_rows(x: Tensor) -> Tensor:
    """``x [B, S, heads, width]`` with dense heads, and aligned tokens that are equally far apart; or a copy."""
    batch, length = x.shape[:2]
    is_dense = x.stride(-1) == 1 or x.shape[-1] == 1
    is_regular = batch == 1 or length == 0 or x.stride(0) == length * x.stride(1)
    return x if is_dense and is_regular and begins_aligned(x) else compact(x)
