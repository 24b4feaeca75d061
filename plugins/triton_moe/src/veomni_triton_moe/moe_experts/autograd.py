"""How autograd joins forward and backward: what is saved, and where the projections' gradients go.

Forward saves its inputs, the pre-activations ``[N, 2I]`` (not with ``recompute``), one buffer of indices, and for an
adapter ``N`` rows of its rank.

With ``accumulate``, the product's epilogue adds a projection's gradient to the one that its ``.grad`` already holds,
and autograd gets none: no second tensor as large as the weights is allocated. Autograd gets the gradient as usual where
``.grad`` is still ``None``, where hooks wait for it, under ``torch.autograd.grad``, and under ``torch.compile``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from veomni_core.kernels import first_derivatives_only
from veomni_triton_moe.moe_experts.operators import Constants, moe_experts_backward, moe_experts_forward

_OPERANDS = 3  # forward's inputs before them
_GATE_UP_PROJ, _DOWN_PROJ = 3, 4  # among the operands
_PARAMETERS = slice(3, 11)  # likewise: both projections, both biases, both adapters' factors


class Experts(Function):
    """The result ``[T, H]``, differentiable by all operands of ``moe_experts_forward`` but the index."""

    @staticmethod
    def forward(ctx: Any, constants: Constants, recompute: bool, accumulate: bool, *operands: Tensor | None) -> Tensor:
        result, pre, *others = moe_experts_forward(*operands, *constants)
        ctx.save_for_backward(*operands, None if recompute else pre, *others)
        ctx.constants, ctx.accumulate = constants, accumulate
        return result  # type: ignore[no-any-return]

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, dresult: Tensor) -> tuple[Tensor | None, ...]:
        tensors, needed = ctx.saved_tensors, ctx.needs_input_grad[_OPERANDS:]
        wanted = list(needed[_PARAMETERS])
        sums: list[Tensor | None] = [None, None]
        # The other parameters are small, and go through autograd.
        if ctx.accumulate and not torch.compiler.is_compiling():
            sums = [_sum_so_far(tensors[place]) if needed[place] else None for place in (_GATE_UP_PROJ, _DOWN_PROJ)]
        dhidden, dweights, *found = moe_experts_backward(dresult, *tensors, *ctx.constants, wanted, *sums)
        for total in sums:
            if total is not None:
                torch.autograd.graph.increment_version(total)  # of a write that autograd did not see
        totals = (*sums, *[None] * 6)
        given = [
            gradient if is_wanted and total is None else None
            for gradient, is_wanted, total in zip(found, wanted, totals, strict=True)
        ]
        return *[None] * _OPERANDS, dhidden, None, dweights, *given


def _sum_so_far(weight: Tensor) -> Tensor | None:
    """``weight.grad``, if this backward may add to it without autograd's knowledge; otherwise ``None``."""
    total = weight.grad if weight.is_leaf else None
    if total is None or not _backward_accumulates(weight):
        return None
    is_awaited = weight._backward_hooks or weight._post_accumulate_grad_hooks
    if is_awaited or total.dtype != weight.dtype or not total.is_contiguous():
        return None
    return total


def _backward_accumulates(weight: Tensor) -> bool:
    """Whether the running backward writes ``weight.grad``: ``torch.autograd.grad`` must leave it unchanged."""
    node = torch.autograd.graph.get_gradient_edge(weight).node
    try:
        return bool(torch._C._will_engine_execute_node(node))  # type: ignore[attr-defined]
    except RuntimeError:  # what torch (2.13) answers for a leaf's node under autograd.grad
        return False
