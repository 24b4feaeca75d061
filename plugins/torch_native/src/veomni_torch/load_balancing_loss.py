"""load_balancing_loss in plain PyTorch: one pass per layer, no one-hot tensor; saves only the given logits.

The loss is ``E · Σ r_e · p_e``, where ``r_e`` is the number of routes to expert ``e`` per token, and ``p_e`` the mean
probability of the expert. So the gradient by a token's probabilities is the same vector ``E · r / tokens`` for every
token that the mask doesn't leave out.

Shapes: T tokens, E experts; B sequences of S tokens; K experts per token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from veomni_core.kernels import first_derivatives_only, without_autocast
from veomni_ops.router_softmax import as_softmax_takes


def standard(
    gate_logits: tuple[Tensor, ...] | None, num_experts: int, top_k: int = 2, attention_mask: Tensor | None = None
) -> Tensor | int:
    """The auxiliary loss over all layers' logits ``[T, E]``, in float32; ``attention_mask[B, S]`` leaves tokens out.

    The gradient has the logits' dtype. Atomic additions don't make the result vary: they only count routes, and sums of
    whole numbers are exact in any order. As in transformers, the result is the number 0 if ``gate_logits`` is not a
    tuple, or an empty one. Where autocast computes softmax in float32, probabilities are not rounded to the logits'
    dtype.
    """
    if not isinstance(gate_logits, tuple) or not gate_logits:
        return 0
    gate_logits = tuple(map(as_softmax_takes, gate_logits))
    return _LoadBalancing.apply(num_experts, top_k, attention_mask, *gate_logits)


def product_keys(
    gate_logits: tuple[Tensor, ...] | None,
    num_experts: int,
    num_keys: int,
    top_k: int = 2,
    attention_mask: Tensor | None = None,
) -> Tensor | float:
    """:func:`standard` for product keys: an expert is a pair of keys, and its logit the sum of their two scores.

    Divided by ``top_k``: here ``r_e`` is the expert's fraction of all routes. Saves the pairs' scores
    ``[T, num_keys²]`` of every layer for backward.

    Args:
        gate_logits: Per layer ``[2, T, num_keys]``.
    """
    if not isinstance(gate_logits, tuple):
        return 0
    scores = tuple((first[:, :, None] + second[:, None, :]).flatten(1) for first, second in gate_logits)
    return standard(scores, num_experts, top_k, attention_mask) / top_k


def given_routes(router_probs: Tensor, expert_indices: Tensor) -> Tensor:
    """Switch Transformers' loss of ``router_probs[B, S, E]`` and the chosen ``expert_indices[B, S]`` or ``[B, S, K]``.

    The gradient has the probabilities' dtype and is the same for every token of a sequence.
    """
    batch, length, experts = router_probs.shape
    routed = torch.zeros(batch, length, experts, dtype=torch.float32, device=router_probs.device)
    routed.scatter_(2, expert_indices.long().reshape(batch, length, -1), 1.0)  # an expert chosen twice counts once
    return (routed.mean(dim=1) * router_probs.mean(dim=1)).mean() * experts**2


class _LoadBalancing(Function):
    @staticmethod
    @without_autocast
    def forward(ctx: Any, num_experts: int, top_k: int, mask: Tensor | None, *gate_logits: Tensor) -> Tensor:
        device = gate_logits[0].device
        routes = torch.zeros(num_experts, dtype=torch.float32, device=device)
        probability = torch.zeros_like(routes)
        probabilities = torch.empty_like(gate_logits[0])
        counted = None if mask is None else mask.reshape(-1).to(device, torch.float32)
        per_layer = gate_logits[0].shape[0] if counted is None else counted.sum()
        for logits in gate_logits:
            torch.softmax(logits, dim=-1, out=probabilities)
            # Unsorted: only the set of experts matters, and on a CPU sorting it takes a tenth of the loss's time.
            chosen = probabilities.topk(top_k, dim=-1, sorted=False).indices.flatten()
            if counted is None:
                routes.scatter_add_(0, chosen, routes.new_ones(()).expand(chosen.numel()))
                probability += probabilities.sum(dim=0, dtype=torch.float32)
            else:
                routes.scatter_add_(0, chosen, counted.repeat_interleave(top_k))
                # Not a matrix product, which autocast would round to 16 bits.
                probability += (probabilities * counted[:, None]).sum(dim=0, dtype=torch.float32)
        tokens = per_layer * len(gate_logits)
        share = routes / tokens
        # The gradient by every token's probabilities, [E]; `counted` is 1 for tokens that the mask keeps, [T].
        ctx.save_for_backward(num_experts * share / tokens, counted, *gate_logits)
        return num_experts * (share * (probability / tokens)).sum()

    @staticmethod
    @without_autocast
    @first_derivatives_only
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        dprobability, counted, *gate_logits = ctx.saved_tensors
        dprobability = dprobability * dloss
        probabilities = torch.empty_like(gate_logits[0], dtype=torch.float32)
        gradients: list[Tensor | None] = []
        for logits, needed in zip(gate_logits, ctx.needs_input_grad[3:], strict=True):
            if not needed:
                gradients.append(None)
                continue
            torch.softmax(logits.float(), dim=-1, out=probabilities)
            # Backward of softmax, with probabilities recomputed in float32.
            inner = (probabilities * dprobability).sum(dim=-1, keepdim=True)
            dlogits = (dprobability - inner).mul_(probabilities)
            if counted is not None:
                dlogits *= counted[:, None]
            gradients.append(dlogits.to(logits.dtype))
        return None, None, None, *gradients
