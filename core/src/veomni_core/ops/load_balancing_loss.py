"""load_balancing_loss: Switch Transformers' auxiliary loss (Fedus et al. 2021, equations 4 to 6).

``(gate_logits: tuple of [T, E], num_experts, top_k, attention_mask[B, S] or None) -> scalar`` in float32, with the
value and the gradient of transformers' ``load_balancing_loss_func``.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from veomni_core.ops.contract import Contract, Draw, Sample, Tolerance, compute_dtype, leaf


def standard(
    gate_logits: tuple[Tensor, ...], num_experts: int, top_k: int = 2, attention_mask: Tensor | None = None
) -> Tensor:
    """``E * sum over experts of (share of routes to it) * (mean probability of it)``, over all layers' tokens.

    A token that ``attention_mask`` marks 0 counts in neither. Probabilities are rounded to the logits' dtype, sums are
    float32. The gradient reaches the logits through the probabilities only.
    """
    dtype = compute_dtype(gate_logits[0])
    routes = torch.zeros(num_experts, dtype=dtype, device=gate_logits[0].device)
    probability = torch.zeros_like(routes)
    tokens = torch.zeros((), dtype=dtype, device=routes.device)
    for logits in gate_logits:
        probabilities = F.softmax(logits, dim=-1)
        chosen = F.one_hot(probabilities.topk(top_k, dim=-1).indices, num_experts).sum(dim=1).to(dtype)
        counts = torch.ones(len(logits), dtype=dtype, device=routes.device)
        if attention_mask is not None:
            counts = attention_mask.reshape(-1).to(counts)
        routes = routes + (chosen * counts[:, None]).sum(dim=0)
        probability = probability + (probabilities.to(dtype) * counts[:, None]).sum(dim=0)
        tokens = tokens + counts.sum()
    return num_experts * ((routes / tokens) * (probability / tokens)).sum()


def _samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    draw = Draw(device, dtype)

    def logits(layers: int, tokens: int, experts: int) -> tuple[Tensor, ...]:
        # A permutation of well-separated levels per token: ties, and differences that rounding closes, would make the
        # top k a matter of taste.
        levels = torch.linspace(-3.0, 3.0, experts, dtype=torch.float64, device=device)
        shifts = [draw.normal(tokens, experts).double().argsort(dim=-1) for _ in range(layers)]
        return tuple(leaf(levels[order].to(dtype)) for order in shifts)

    yield Sample("odd sizes", (logits(3, 21, 7), 7, 2))
    yield Sample("one layer, top 1", (logits(1, 16, 4), 4, 1))
    yield Sample("many experts", (logits(2, 30, 64), 64, 8))
    mask = torch.ones(3, 8, dtype=torch.long, device=device)
    mask[0, 5:], mask[2, 1:] = 0, 0
    yield Sample("a mask", (logits(2, 24, 8), 8, 2, mask))
    yield Sample("a mask that keeps all", (logits(2, 24, 8), 8, 2, torch.ones(3, 8, device=device)))
    strided = tuple(leaf(each.detach().repeat_interleave(2, dim=1)[:, ::2]) for each in logits(2, 18, 6))
    yield Sample("logits with a stride", (strided, 6, 2))
    transposed = tuple(leaf(each.detach().t().contiguous().t()) for each in logits(2, 16, 8))
    yield Sample("transposed logits and a mask", (transposed, 8, 2, mask[:2]))


VALUES = {
    "float32": Tolerance(element=4e-6, norm=4e-6),
    "bfloat16": Tolerance(element=1e-2, norm=1e-2),
    "float16": Tolerance(element=1.5e-3, norm=1.5e-3),
}
# In low precision transformers rounds the probabilities, and the softmax's gradient subtracts nearly equal ones.
GRADIENTS = {
    "float32": Tolerance(element=1e-5, norm=4e-6),
    "bfloat16": Tolerance(element=1.5e-1, norm=6e-2),
    "float16": Tolerance(element=2e-2, norm=8e-3),
}

CONTRACTS = {"standard": Contract("load_balancing_loss", "standard", standard, _samples, VALUES, GRADIENTS)}
