"""Rotary embeddings as models call them: the variant, the shapes and the memory layout of queries and keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """One call of a model.

    Attributes:
        family: The folder of transformers in which the model's function is.
        function: Its name there.
        variant: The contract's variant that it is.
        batch: Sequences.
        heads: Heads of queries and of keys.
        width: Dimensions of a head that the function gets.
        rotated: How many of them it rotates.
        before: In multi-head latent attention, what lies before those dimensions in a row of each projection: the rest
            of a query's head, and the latent before the one key. The function then gets views with gaps.
        angles: The dtype of ``cos`` and ``sin``.
        positions: The sequences' length.
    """

    family: str
    function: str
    variant: str
    batch: int
    heads: tuple[int, int]
    width: int
    rotated: int
    before: tuple[int, int] = (0, 0)
    angles: torch.dtype = torch.bfloat16
    positions: int = 4096

    def __str__(self) -> str:
        heads = "/".join(map(str, self.heads))
        return f"{self.family} ({self.variant}): B={self.batch} S={self.positions} heads {heads} D={self.width}"

    def model_function(self) -> Callable[..., Any]:
        """transformers' own code."""
        module = import_module(f"transformers.models.{self.family}.modeling_{self.family}")
        function: Callable[..., Any] = getattr(module, self.function)
        return function

    def drawn_heads(self) -> tuple[Tensor, ...]:
        """Queries and keys ``[B, H, S, D]`` in bfloat16, as views of what a projection gives."""
        return tuple(
            torch.randn(self.batch, self.positions, heads, before + self.width, device="cuda")
            .bfloat16()[..., before:]
            .transpose(1, 2)
            for heads, before in zip(self.heads, self.before, strict=True)
        )

    def drawn_angles(self) -> tuple[Tensor, ...]:
        """``cos`` and ``sin`` ``[B, S, rotated]``: both halves the same, in which all these families give them."""
        angles = torch.randn(self.batch, self.positions, self.rotated // 2, device="cuda").repeat(1, 1, 2)
        return angles.cos().to(self.angles), angles.sin().to(self.angles)


CASES = (
    Case("llama", "apply_rotary_pos_emb", "full", 4, (32, 8), 128, 128),
    Case("glm4_moe", "apply_rotary_pos_emb", "partial", 2, (96, 8), 128, 64),
    Case("ernie4_5", "apply_rotary_pos_emb", "interleaved", 4, (32, 8), 128, 128, angles=torch.float32),
    Case("deepseek_v3", "apply_rotary_pos_emb_interleave", "deinterleaved", 2, (128, 1), 64, 64, before=(128, 512)),
    Case("glm_moe_dsa", "apply_rotary_pos_emb_interleave", "deinterleaved", 2, (64, 1), 64, 64, before=(192, 512)),
    Case("glm4_moe_lite", "apply_rotary_pos_emb_interleave", "deinterleaved", 4, (20, 1), 64, 64, before=(192, 512)),
)
