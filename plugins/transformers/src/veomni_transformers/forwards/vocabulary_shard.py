"""The loss of logits whose words are sharded over ranks: a kernel sees its rank's words, two numbers a token travel.

Shape suffixes: ``T`` tokens, ``H`` hidden width, ``Vs`` words of one rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed
from torch.autograd import Function

from veomni_core.kernels import first_derivatives_only


@dataclass(frozen=True)
class VocabularyShard:
    """Which of ``words`` this rank has: those from ``first_word`` on, by the order of ranks in ``group``."""

    words: int
    first_word: int
    group: Any

    @classmethod
    def of(cls, weight: Any) -> VocabularyShard:
        """This rank's shard of ``weight``, a DTensor ``[V, H]`` that is ``Shard(0)`` over a mesh of one dimension."""
        mesh, words = weight.device_mesh, weight.shape[0]
        most = -(-words // mesh.size())
        return cls(words, min(mesh.get_local_rank() * most, words), mesh.get_group())

    @property
    def ranks(self) -> int:
        """How many ranks share the words."""
        return int(self.group.size())

    def loss(
        self,
        kernel: Callable[..., tuple[Tensor, Tensor]],
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        bias: Tensor | None,
        ignore_index: int,
        num_items_in_batch: int | None,
        softcap: float | None,
        scale: float | None,
    ) -> Tensor:
        """The loss of ``hidden[T, H]`` against ``labels[T]``, the same on all ranks.

        ``kernel`` computes ``cross_entropy_loss/vocabulary_parallel`` of this rank's ``weight[Vs, H]``. The other
        arguments are those of ``cross_entropy_loss/causal``. The gradient of ``hidden`` is summed over the ranks.
        """
        if hidden.requires_grad:
            hidden = _SummedGradient.apply(hidden, self.group)
        if weight.shape[0]:
            options = {"bias": bias, "ignore_index": ignore_index, "softcap": softcap, "scale": scale}
            parts = kernel(hidden, weight, labels, self.first_word, **options)
        else:
            parts = _of_no_words(hidden, weight, bias)
        counts = labels != ignore_index
        total = _SumOfLosses.apply(*parts, counts, self.group)
        return total / (counts.sum().clamp_min(1) if num_items_in_batch is None else num_items_in_batch)


def _of_no_words(*inputs: Tensor | None) -> tuple[Tensor, Tensor]:
    """What a rank without words contributes, in a graph that ends at all inputs: its backward must meet the others'."""
    zero = sum(each.sum() for each in inputs if each is not None) * 0
    zeros = zero.float().expand(inputs[0].shape[0])  # type: ignore[union-attr]
    return zeros - torch.inf, zeros


class _SummedGradient(Function):
    """``hidden -> hidden``; its gradient is summed over the ranks, each of which has that of its own words."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return hidden.view_as(hidden)

    @staticmethod
    @partial(first_derivatives_only, op="cross_entropy_loss")
    def backward(ctx: Any, dhidden: Tensor) -> tuple[Tensor, None]:
        dhidden = dhidden.contiguous()
        distributed.all_reduce(dhidden, group=ctx.group)
        return dhidden, None


class _SumOfLosses(Function):
    """``log_sum_exp[T], label_logit[T] -> loss``, the sum over all tokens that count, from every rank's parts."""

    @staticmethod
    def forward(ctx: Any, log_sum_exp: Tensor, label_logit: Tensor, counts: Tensor, group: Any) -> Tensor:
        mine = torch.stack((log_sum_exp, label_logit))
        parts = [torch.empty_like(mine) for _ in range(group.size())]
        distributed.all_gather(parts, mine, group=group)
        log_sum_exps, label_logits = torch.stack(parts, dim=1)  # [ranks, T] each
        whole = torch.logsumexp(log_sum_exps, dim=0)
        ctx.save_for_backward(torch.where(counts, (log_sum_exp - whole).exp(), 0.0), counts)
        return torch.where(counts, whole - label_logits.sum(dim=0), 0.0).sum()

    @staticmethod
    @partial(first_derivatives_only, op="cross_entropy_loss")
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor, Tensor, None, None]:
        share, counts = ctx.saved_tensors  # share: of this rank's words in a token's probability
        return dloss * share, -dloss * counts, None, None
