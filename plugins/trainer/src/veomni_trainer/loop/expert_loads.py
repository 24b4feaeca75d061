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
from veomni_ops.dispatch_traffic import BY_CHOICE, BY_RANK, DispatchLayout
from veomni_trainer.job.train_section import TrainSection

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
        modules: list[Any] = [model.get_submodule(site.path) for site in sites]
        # The model's own modules, under PEFT's wrappers if their weights are adapted.
        self._layers = [each.get_base_layer() if hasattr(each, "get_base_layer") else each for each in modules]
        if not self._layers:
            raise ConfigError("train.expert_loads: this model has no experts; write false, or leave it out")
        self._sizes, self._tp_rank = train, rank % train.tp_size
        self._experts = max(parameter.shape[0] for layer in self._layers for parameter in layer.parameters())
        self._way = _way_of(binding)
        self._counts: Tensor | None = None  # [layers, experts]: this rank's rows for each expert
        self._visits: Tensor | None = None  # [layers, ranks of the group]: its tokens that have an expert on each rank
        self._token = (0, 0, 0)  # choices, width and bytes of a value
        self.is_paused: Callable[[], bool] = lambda: False  # whether a forward that runs now is no part of the training

    def start_step(self) -> None:
        """Forget what was counted."""
        self._counts = self._visits = None

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
        if self._counts is None or self._visits is None:
            return {}
        ranks, visits = (gather(each[None]).double().cpu() for each in (self._counts, self._visits))
        self.start_step()
        per_expert = ranks.sum(0)
        loads: dict[str, Any] = {"expert_load": _peak(per_expert), "expert_rows": per_expert.long().tolist()}
        if (ep := self._sizes.ep_size) > 1:
            sent = rows_sent(ranks, ep)
            loads["rank_load"] = _peak(sent.sum(1).transpose(0, 1).flatten(1))
            rows = sent if self._way == BY_CHOICE else visits.view(-1, ep, *visits.shape[1:])
            loads |= {"dispatch_bytes": self._bytes(leaving(rows))} if self._way else {}
        return loads

    def _bytes(self, rows: float) -> int:
        """What ``rows`` are in bytes: there and back, in forward, backward, and a forward that backward repeats."""
        choices, width, item_bytes = self._token
        layout = DispatchLayout(self._sizes.ep_size, self._experts, choices, width, item_bytes)
        moved = layout.bytes_of(self._way, rows) - layout.bytes_of(self._way, 0)  # without the counts of rows
        return int(moved) * (3 if self._sizes.gradient_checkpointing else 2)

    def _hook(self, layer: int) -> Callable[..., None]:
        def count(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self.is_paused():
                return
            hidden, index, *_ = [*args, *kwargs.values()]
            ranks = self._sizes.ep_size
            if self._counts is None or self._visits is None:
                self._counts = torch.zeros(len(self._layers), self._experts, dtype=torch.long, device=index.device)
                self._visits = torch.zeros(len(self._layers), ranks, dtype=torch.long, device=index.device)
                self._token = (index.shape[-1], hidden.shape[-1], hidden.element_size())
            # The ranks of a tensor-parallel group have the same tokens, and each sends its part of them.
            parts = index.detach().chunk(self._sizes.tp_size)
            if self._tp_rank < len(parts):
                chosen = parts[self._tp_rank]
                self._counts[layer].scatter_add_(0, chosen.reshape(-1), torch.ones_like(chosen.reshape(-1)))
                owners = chosen.div(self._experts // ranks, rounding_mode="floor")
                visited = torch.zeros(len(chosen), ranks, dtype=torch.long, device=index.device)
                self._visits[layer] += visited.scatter_(1, owners, 1).sum(0)

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


def leaving(sent: Tensor) -> float:
    """The rows of :func:`rows_sent` that go to another rank, in all.

    Example:
        >>> leaving(torch.tensor([[[[3, 7]], [[11, 15]]]]))
        18.0
    """
    return float(sent.sum() - sent.diagonal(dim1=1, dim2=3).sum())


def _way_of(binding: Binding) -> str:
    """How the plan's token dispatch sends rows, as ``bytes_of`` knows it; empty for kernels that it doesn't know."""
    decisions = [each for op in binding.plan.ops if op.op_name == "token_dispatch" for each in op.sites]
    kernels = {each.spec.name if each.spec else BY_CHOICE for each in decisions} or {BY_CHOICE}
    return kernels.pop() if kernels <= {BY_RANK} or kernels <= {BY_CHOICE} else ""


def _peak(rows: Tensor) -> float:
    """The largest of ``rows[layers, ...]`` over the mean, on average over the layers."""
    return float((rows.amax(-1) / rows.mean(-1).clamp_min(1e-9)).mean())
