"""load_balancing_loss in plain PyTorch: one pass per layer, no one-hot tensor, and only the given logits are saved.

With ``r`` the share of routes per expert, the loss is ``E · Σ r_e · p_e`` where ``p_e`` is the mean probability, so the
gradient of a token's probabilities is the same vector ``E · r / tokens`` for every token that counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

# 256 KiB of float32 at 64 experts, which stays in a core's cache. On other devices a launch costs more than it saves.
_CPU_ROWS = 1024


def standard(
    gate_logits: tuple[Tensor, ...], num_experts: int, top_k: int = 2, attention_mask: Tensor | None = None
) -> Tensor:
    """The auxiliary loss over all layers' ``[T, E]`` logits, in float32; ``attention_mask[B, S]`` leaves tokens out.

    The gradient has the logits' dtype. Results do not depend on the order of additions: routes are whole numbers.
    """
    return _LoadBalancing.apply(num_experts, top_k, attention_mask, *gate_logits)  # type: ignore[no-any-return]


class _LoadBalancing(Function):
    @staticmethod
    def forward(ctx: Any, num_experts: int, top_k: int, mask: Tensor | None, *gate_logits: Tensor) -> Tensor:
        device = gate_logits[0].device
        routes = torch.zeros(num_experts, device=device)
        probability = torch.zeros(num_experts, device=device)
        counted = None if mask is None else mask.reshape(-1).to(device, torch.float32)
        per_layer = gate_logits[0].shape[0] if counted is None else counted.sum()
        for logits in gate_logits:
            for rows in _blocks(logits):
                probabilities = torch.softmax(logits[rows], dim=-1)
                # Unsorted: only the set counts, and sorting it costs a tenth of the whole loss on a CPU.
                chosen = probabilities.topk(top_k, dim=-1, sorted=False).indices.flatten()
                if counted is None:
                    routes.scatter_add_(0, chosen, torch.ones((), device=device).expand(chosen.numel()))
                    probability += probabilities.sum(dim=0, dtype=torch.float32)
                else:
                    routes.scatter_add_(0, chosen, counted[rows].repeat_interleave(top_k))
                    probability += counted[rows] @ probabilities.float()
        tokens = per_layer * len(gate_logits)
        share = routes / tokens
        ctx.save_for_backward(num_experts * share / tokens, counted, *gate_logits)
        return num_experts * (share * (probability / tokens)).sum()

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        dprobability, counted, *gate_logits = ctx.saved_tensors
        dprobability = dprobability * dloss
        gradients = [
            _logits_gradient(logits, dprobability, counted) if needed else None
            for logits, needed in zip(gate_logits, ctx.needs_input_grad[3:], strict=True)
        ]
        return None, None, None, *gradients


def _blocks(logits: Tensor) -> Iterator[slice]:
    """The rows that are worked on together."""
    rows = _CPU_ROWS if logits.is_cpu else max(logits.shape[0], 1)
    return (slice(first, first + rows) for first in range(0, logits.shape[0], rows))


def _logits_gradient(logits: Tensor, dprobability: Tensor, counted: Tensor | None) -> Tensor:
    dlogits = torch.softmax(logits, dim=-1, dtype=torch.float32)
    for rows in _blocks(logits):
        probabilities = dlogits[rows]
        upstream = dprobability.expand_as(probabilities) if counted is None else counted[rows, None] * dprobability
        probabilities.copy_(torch.ops.aten._softmax_backward_data(upstream, probabilities, -1, torch.float32))
    return dlogits.to(logits.dtype)
