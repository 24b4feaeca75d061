"""router: from a router's logits, which experts each token goes to and with what weights.

``(logits[T, E], top_k, bias[E] or None, ...) -> (weights[T, K], indices[T, K])``. A variant is the function that makes
scores of logits; what is chosen among scores, and what is made of the chosen, are arguments. Of equal scores the one
with the lower index comes first. So a choice depends on the scores alone, and on no place of a row in a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from veomni_ops.contract import compute_dtype

TOP_TWO, LARGEST = "top_two", "largest"  # what a group of experts is chosen by: the sum of its two best, or its best

SCORES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits: torch.softmax(logits, dim=-1),
    "sigmoid": torch.sigmoid,
    "root_softplus": lambda logits: F.softplus(logits).sqrt(),
}


def route(
    logits: Tensor,
    top_k: int,
    bias: Tensor | None = None,
    *,
    variant: str,
    groups: int = 1,
    kept_groups: int = 1,
    group_score: str = TOP_TWO,
    normalize: bool = False,
    scale: float = 1.0,
    chosen: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose ``top_k`` experts for each token, and weigh them.

    Args:
        logits: ``[T, E]``, of any floating dtype.
        top_k: K.
        bias: ``[E]``, added to the scores by which experts are chosen, and not to weights.
        variant: what is made of logits; a key of :data:`SCORES`. A softmax of the chosen logits alone is ``softmax``
            with ``normalize``.
        groups: experts are in as many groups of neighbours, of which ``kept_groups`` are chosen first.
        group_score: what a group is chosen by, :data:`TOP_TWO` or :data:`LARGEST` of its experts.
        normalize: whether weights are divided by their sum.
        scale: what weights are multiplied by, last.
        chosen: ``[T, K]``, experts to take in place of those with the largest scores; rows of -1 choose themselves.

    Returns:
        Weights ``[T, K]`` in float32 (float64 for such logits), which have gradients of the logits, and indices
        ``[T, K]``, the best first.

    Example:
        >>> weights, experts = route(torch.tensor([[0.0, 2.0, 2.0, 1.0]]), 2, variant="sigmoid", normalize=True)
        >>> experts.tolist(), weights.tolist()
        ([[1, 2]], [[0.5, 0.5]])
        >>> route(torch.zeros(1, 4), 1, variant="softmax", chosen=torch.tensor([[3]]))
        (tensor([[0.2500]]), tensor([[3]]))
    """
    scores = SCORES[variant](logits.to(compute_dtype(logits)))
    by = scores.detach() if bias is None else scores.detach() + bias
    if groups > 1:
        of_groups = by.unflatten(-1, (groups, -1))
        best = of_groups.sort(dim=-1, descending=True).values[..., : 2 if group_score == TOP_TWO else 1].sum(-1)
        kept = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, largest(best, kept_groups), True)
        by = of_groups.masked_fill(~kept.unsqueeze(-1), -torch.inf).flatten(-2)
    indices = largest(by, top_k)
    if chosen is not None:
        indices = torch.where(chosen < 0, indices, chosen)
    weights = scores.gather(-1, indices)
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * scale, indices


def largest(scores: Tensor, count: int) -> Tensor:
    """The indices of the ``count`` largest of ``scores[..., E]``, the largest first; of equal ones the first.

    Example:
        >>> largest(torch.tensor([0.1, 0.7, 0.2, 0.7]), 2).tolist()
        [1, 3]
    """
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]
