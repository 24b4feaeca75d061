"""cross_entropy_loss in a fixed order, one chunk of tokens at a time: a token's loss doesn't depend on the others.

A chunk has all words of its tokens, so forward computes its gradients in the memory of its logits, and backward
multiplies them. Logits and their sums are those of ``triton_fixed_order`` of token_logprobs, bit for bit.

Shapes: T tokens, H hidden size, V vocabulary, C tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from veomni_core.kernels import IGNORED, first_derivatives_only, product_operands, without_autocast
from veomni_ops.head_chunks import chunks, kept_for_backward, scaled
from veomni_ops.token_logprobs import LOGPROBS
from veomni_ops.torch_operators import operator
from veomni_triton.token_logprobs.launch import add_to_sums, write_gradient
from veomni_triton.token_logprobs.products import add_product, project
from veomni_triton.token_logprobs.statistics import Statistics, sums_of_nothing


def causal(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = IGNORED,
    num_items_in_batch: int | Tensor | None = None,
    softcap: float | None = None,
    scale: float | None = None,
) -> Tensor:
    """Mean cross entropy of ``hidden[T, H] @ weight[V, H].T`` against the shifted ``labels[T]``, in float32.

    Divided by the number of labels, or by ``num_items_in_batch``. If every label is ignored, the loss and its gradients
    are zero. Gradients reach hidden, weight and bias; those of weight and bias are summed in float32.

    Raises:
        TypeError: hidden, weight and bias differ in dtype, and autocast is off.
    """
    divisor: Any = num_items_in_batch
    if divisor is None:
        divisor = (labels != ignore_index).sum().clamp_min(1)
    hidden, weight, bias = product_operands("triton", hidden=hidden, weight=weight, bias=bias)
    numbers = (1.0 if scale is None else scale, softcap or 0.0)
    learns = torch.is_grad_enabled()  # read here: inside a Function, grad mode is always off
    return _SumOfLosses.apply(hidden, weight, bias, labels, *numbers, ignore_index, learns) / divisor


class _SumOfLosses(Function):
    """The sum of the losses. Forward saves the gradients of the sum: those of a mean would underflow in float16."""

    @staticmethod
    @without_autocast
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        scale: float,
        softcap: float,
        ignore_index: int,
        learns: bool,
    ) -> Tensor:
        ctx.wanted = [learns and needed for needed in ctx.needs_input_grad[:3]]
        total, *gradients = _sum_of_losses(hidden, weight, bias, labels, scale, softcap, ignore_index, ctx.wanted)
        ctx.save_for_backward(*gradients)
        ctx.dtype = hidden.dtype
        return total  # type: ignore[no-any-return]

    @staticmethod
    @first_derivatives_only
    @without_autocast
    def backward(ctx: Any, dtotal: Tensor) -> tuple[Tensor | None, ...]:
        saved = zip(ctx.saved_tensors, ctx.wanted, strict=True)
        return *(scaled(each, dtotal, ctx.dtype) if wanted else None for each, wanted in saved), *(None,) * 5


# An operator is opaque to torch.compile. It can't return None: a gradient that isn't wanted is empty.


def _sum_of_losses_of(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    scale: float,
    softcap: float,
    ignore_index: int,
    wanted: Sequence[bool],
) -> tuple[Tensor, ...]:
    of_hidden, of_weight, of_bias = wanted
    total = hidden.new_zeros((), dtype=torch.float32)
    dhidden = torch.empty_like(hidden) if of_hidden else hidden.new_empty(0)
    dweight = torch.zeros_like(weight, dtype=torch.float32) if of_weight else weight.new_empty(0)
    dbias = hidden.new_zeros(len(weight) if of_bias else 0, dtype=torch.float32)
    counts_T = labels != ignore_index
    targets_T, upstream_T = torch.where(counts_T, labels, 0), -counts_T.float()
    numbers = (1.0, scale, softcap)
    parts = chunks(len(hidden), len(weight), hidden.element_size())
    buffer = hidden.new_empty(max((part.stop - part.start for part in parts), default=0), len(weight))
    losses_T = torch.zeros_like(upstream_T)
    for part in parts:
        states_CH, logits_CV = hidden[part], buffer[: part.stop - part.start]
        project(states_CH, weight, bias, logits_CV, in_fixed_order=True)
        sums = sums_of_nothing(len(states_CH), hidden.device)
        add_to_sums(logits_CV, 0, targets_T[part], None, numbers, (LOGPROBS,), sums, in_fixed_order=True)
        statistics = Statistics(sums, len(weight))
        losses_T[part] = torch.where(counts_T[part], -statistics.of(LOGPROBS), 0.0)
        if any(wanted):
            normalizer = statistics.log_normalizer()
            write_gradient(
                logits_CV, logits_CV, 0, targets_T[part], None, numbers, normalizer, None, upstream_T[part], None
            )
        dlogits_CV = logits_CV
        if of_hidden:
            torch.mm(dlogits_CV, weight, out=dhidden[part])
        if of_weight:
            add_product(dweight, dlogits_CV.t(), states_CH)
        if of_bias:
            dbias += dlogits_CV.sum(0, dtype=torch.float32)
    torch.sum(losses_T, 0, out=total)
    return total, dhidden, *(kept_for_backward(each, hidden.dtype) for each in (dweight, dbias))


def _sum_of_losses_like(hidden: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    of_hidden, of_weight, of_bias = rest[-1]
    dtype = torch.float32 if hidden.dtype == torch.float16 else hidden.dtype
    return (
        hidden.new_empty((), dtype=torch.float32),
        torch.empty_like(hidden) if of_hidden else hidden.new_empty(0),
        torch.empty_like(weight, dtype=dtype) if of_weight else weight.new_empty(0, dtype=dtype),
        hidden.new_empty(len(weight) if of_bias else 0, dtype=dtype),
    )


_sum_of_losses = operator(
    "veomni_triton::cross_entropy_sum(Tensor hidden, Tensor weight, Tensor? bias, Tensor labels, float scale,"
    " float softcap, int ignore_index, bool[] wanted) -> (Tensor total, Tensor dhidden, Tensor dweight, Tensor dbias)",
    _sum_of_losses_of,
    _sum_of_losses_like,
)
