"""The shapes of mixture-of-experts MLPs that are measured, and random operands of one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.shared.measuring import drop_gradients
from veomni_ops import moe_experts as contract


@dataclass(frozen=True)
class Shape:
    """Tokens, hidden size, intermediate size, experts, experts per token; whether some experts are chosen far more.

    Where they are, the expert of rank r is drawn with a probability in proportion to 1 / r.
    """

    tokens: int
    hidden: int
    intermediate: int
    experts: int
    k: int
    skewed: bool = False

    @property
    def forward_flop(self) -> float:
        """The useful work of a forward; a backward has twice as much."""
        return 6.0 * self.tokens * self.k * self.hidden * self.intermediate


SHAPES = {
    "qwen3-30b-a3b": Shape(16384, 2048, 768, 128, 8),
    "olmoe": Shape(16384, 2048, 1024, 64, 8),
    "mixtral-8x7b": Shape(8192, 4096, 14336, 8, 2),
    "deepseek-v3 shard": Shape(16384, 7168, 2048, 8, 1),
    "qwen3-30b-a3b, T=2048": Shape(2048, 2048, 768, 128, 8),
    "qwen3-30b-a3b, skewed": Shape(16411, 2048, 768, 128, 8, skewed=True),
    "512 experts of 512, K=10": Shape(16384, 2048, 512, 512, 10),
}


class Problem:
    """Random operands of one shape; the experts of a token are the best of random scores, as a router takes them."""

    def __init__(self, shape: Shape) -> None:
        torch.manual_seed(0)
        weights, self.index = self._scores(shape).softmax(dim=-1).topk(shape.k, dim=-1)
        self.hidden = self._leaf(torch.randn(shape.tokens, shape.hidden, device="cuda"))
        self.weights = self._leaf(weights / weights.sum(dim=-1, keepdim=True))
        width = 2 * shape.intermediate
        self.gate_up = self._leaf(0.02 * torch.randn(shape.experts, width, shape.hidden, device="cuda"))
        self.down = self._leaf(0.02 * torch.randn(shape.experts, shape.hidden, shape.intermediate, device="cuda"))
        self.upstream = torch.randn_like(self.hidden)

    @staticmethod
    def _scores(shape: Shape) -> Tensor:
        """``[T, E]``."""
        if not shape.skewed:
            return torch.randn(shape.tokens, shape.experts, device="cuda")
        # The largest of log p and Gumbel noise are a draw without replacement with the probabilities p.
        noise = -torch.rand(shape.tokens, shape.experts, device="cuda").log().neg().log()
        return noise - torch.arange(1, shape.experts + 1, device="cuda").log()

    @staticmethod
    def _leaf(values: Tensor) -> Tensor:
        return values.to(torch.bfloat16).requires_grad_()

    @property
    def leaves(self) -> dict[str, Tensor]:
        """The tensors whose gradients are taken."""
        return {"hidden": self.hidden, "weights": self.weights, "gate_up": self.gate_up, "down": self.down}

    def forget_gradients(self) -> None:
        """Give back the memory of the gradients; one kernel would add to them instead of giving its own."""
        drop_gradients(self.leaves.values())

    def arguments(self) -> tuple[Tensor, ...]:
        """The contract's call."""
        return (self.hidden, self.index, self.weights, self.gate_up, self.down)

    def exact(self) -> dict[str, Tensor]:
        """The result and the gradients in float64, rounded to float32 to be kept."""
        leaves = [tensor.detach().double().requires_grad_() for tensor in self.leaves.values()]
        hidden, weights, gate_up, down = leaves
        result = contract.standard(hidden, self.index, weights, gate_up, down)
        gradients = torch.autograd.grad(result, leaves, self.upstream.double())
        named = zip(("result", *self.leaves), (result.detach(), *gradients), strict=True)
        return {name: value.float() for name, value in named}
