"""How much of an indexer's loss counts in a step: as much as the model's own, into whatever the step is divided.

A trainer that divides a step into micro-batches gives each forward ``num_items_in_batch``, the labels of the whole step
on all ranks, by which the model divides its sum of losses. The indexer's sum is divided by the same number. What a
trainer multiplies the model's loss by afterwards (the number of ranks, a share of a micro-batch, a scale of float16) is
the gradient that the loss gets, and an indexer's loss gets it too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from veomni_core.kernels import first_derivatives_only

STEP = "indexer_step"  # the keyword by which a model's forward passes its step to its attention modules


class IndexerStep:
    """One forward of a model: how many items its step has, if its call says so, and then the gradient of its loss."""

    def __init__(self, items: Tensor | int | None = None) -> None:
        self.items = items
        self.dloss: Tensor | None = None

    def total(self, losses: Tensor, counts: Tensor) -> Tensor:
        """The part of the step's mean that queries with ``losses[B, T]`` have, of which some are padding.

        Without a number of items it is the mean over the queries that count.
        """
        found = losses.masked_fill(~counts, 0.0).sum()
        if self.items is None:
            return found / counts.sum().clamp_min(1)
        return found / (self.items.to(found.device) if isinstance(self.items, Tensor) else self.items)


def with_steps(own: Callable[..., Any]) -> Callable[..., Any]:
    """``own``, the forward of a model, which makes a step, and notes the gradient of its loss if it has one."""

    @wraps(own)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return own(self, *args, **kwargs)
        step = IndexerStep(kwargs.get("num_items_in_batch"))
        output = own(self, *args, **kwargs, **{STEP: step})
        loss = output[0] if isinstance(output, tuple) else output.get("loss") if isinstance(output, dict) else None
        if not isinstance(loss, Tensor) or loss.dim() or not loss.requires_grad:
            return output
        noted = _Noted.apply(loss, step)
        if isinstance(output, tuple):
            return noted, *output[1:]
        output["loss"] = noted
        return output

    return forward


def beside(output: Tensor, loss: Tensor, step: IndexerStep) -> Tensor:
    """``output``, and in backward the gradient to ``loss`` that the model's own loss got; 1 where it has none."""
    found: Tensor = _Beside.apply(output, loss, step)
    return found


class _Noted(torch.autograd.Function):
    """Gives ``loss``; its backward, the first of a step, keeps the gradient for the layers' that follow."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, step: IndexerStep) -> Tensor:
        ctx.step = step
        return loss.view_as(loss)

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor, None]:
        ctx.step.dloss = dloss
        return dloss, None


class _Beside(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, loss: Tensor, step: IndexerStep) -> Tensor:
        ctx.step = step
        ctx.save_for_backward(loss)
        return output.view_as(output)

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, doutput: Tensor) -> tuple[Tensor, Tensor, None]:
        (loss,) = ctx.saved_tensors
        given = ctx.step.dloss
        return doutput, torch.ones_like(loss) if given is None else given.to(loss), None
