"""Counts how many rows each expert gets in a step that is logged: per expert, per rank, and what ranks send each other.

A hook on each experts module sees the router's choices. It is there during the forwards of such a step alone, and adds
to a tensor on the device: no step waits for the device, and the others run as if nothing was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from veomni_core import Binding
from veomni_core.errors import ConfigError
from veomni_trainer.job.schema import TrainSection

Gather = Callable[[Tensor], Tensor]


class ExpertLoads:
    """The rows of every expert of a model, in the forwards that run inside of :meth:`counting`.

    Args:
        model: the bound model.
        binding: its binding, whose plan knows the experts.
        train: the job's sizes.
        rank: of this process.

    Raises:
        ConfigError: the model has no experts.
    """

    def __init__(self, model: nn.Module, binding: Binding, train: TrainSection, rank: int) -> None:
        sites = [each.site for op in binding.plan.ops if op.op_name == "moe_experts" for each in op.sites]
        self._layers = [model.get_submodule(site.path) for site in sites]
        if not self._layers:
            raise ConfigError("train.expert_loads: this model has no experts; write false, or leave it out")
        self._sizes, self._tp_rank = train, rank % train.tp_size
        self._experts = max(parameter.shape[0] for layer in self._layers for parameter in layer.parameters())
        dispatchers = {each.kernel for op in binding.plan.ops if op.op_name == "token_dispatch" for each in op.sites}
        self._sends_choices = dispatchers <= {"eager"}  # a row for each choice, as transformers' own dispatch
        self._counts: Tensor | None = None
        self._row_bytes = 0

    def start_step(self) -> None:
        """Forget what was counted."""
        self._counts = None

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the forwards that run in this context. A forward that backward repeats is outside of it."""
        handles = [
            layer.register_forward_pre_hook(self._hook(number), with_kwargs=True)
            for number, layer in enumerate(self._layers)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def measure(self, gather: Gather) -> dict[str, Any]:
        """What was counted in this step, of all ranks: the values of a row of metrics. All ranks call this.

        Args:
            gather: stacks the tensors of all ranks along their first dimension.
        """
        counts, self._counts = self._counts, None
        if counts is None:
            return {}
        ranks = gather(counts[None]).double().cpu()
        per_expert = ranks.sum(0)
        loads: dict[str, Any] = {"expert_load": _peak(per_expert), "expert_rows": per_expert.long().tolist()}
        if (ep := self._sizes.ep_size) > 1:
            sent = rows_sent(ranks, ep)
            loads["rank_load"] = _peak(sent.sum(1).transpose(0, 1).flatten(1))
            if self._sends_choices:
                loads["dispatch_bytes"] = int(leaving(sent)) * self._row_bytes * self._passes()
        return loads

    def _passes(self) -> int:
        """Each row goes to its expert and back, in forward and in backward, and in a forward that backward repeats."""
        return 2 * (3 if self._sizes.gradient_checkpointing else 2)

    def _hook(self, layer: int) -> Callable[..., None]:
        def count(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden, index, *_ = [*args, *kwargs.values()]
            if self._counts is None:
                self._counts = torch.zeros(len(self._layers), self._experts, dtype=torch.long, device=index.device)
                self._row_bytes = hidden.shape[-1] * hidden.element_size()
            # The ranks of a tensor-parallel group have the same tokens, and each sends its part of them.
            parts = index.detach().chunk(self._sizes.tp_size)
            if self._tp_rank < len(parts):
                chosen = parts[self._tp_rank].reshape(-1)
                self._counts[layer].scatter_add_(0, chosen, torch.ones_like(chosen))

        return count


def rows_sent(counts: Tensor, ep_size: int) -> Tensor:
    """Rows from each rank to each rank of its group of experts.

    Args:
        counts: ``[ranks, layers, experts]``, the rows that each rank has for each expert.
        ep_size: the number of neighbouring ranks that hold all experts together, in order.

    Returns:
        ``[groups, ranks of the group (from), layers, ranks of the group (to)]``.

    Example:
        >>> rows_sent(torch.tensor([[[1, 2, 3, 4]], [[5, 6, 7, 8]]]), 2).tolist()
        [[[[3, 7]], [[11, 15]]]]
    """
    ranks, layers, experts = counts.shape
    return counts.view(ranks // ep_size, ep_size, layers, ep_size, experts // ep_size).sum(-1)


def leaving(sent: Tensor) -> Tensor:
    """The rows of :func:`rows_sent` that go to another rank, in all.

    Example:
        >>> leaving(torch.tensor([[[[3, 7]], [[11, 15]]]])).item()
        18
    """
    return sent.sum() - sent.diagonal(dim1=1, dim2=3).sum()


def _peak(rows: Tensor) -> float:
    """The largest of ``rows[layers, ...]`` over the mean, on average over the layers."""
    return float((rows.amax(-1) / rows.mean(-1).clamp_min(1e-9)).mean())
