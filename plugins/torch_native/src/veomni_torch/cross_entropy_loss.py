"""Causal linear cross entropy, one chunk of tokens at a time: not all logits exist at once.

Forward computes each chunk's gradients while its logits exist, so no logits are computed twice. Backward only scales
the gradients.

Shapes: T tokens, H hidden size, V vocabulary, rows = tokens of one chunk.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from veomni_core.kernels import IGNORED, first_derivatives_only, product_operands
from veomni_ops.head_chunks import kept_for_backward, scaled
from veomni_torch.fixed_order import linear
from veomni_torch.logit_chunks import add_product, chunks, scaled_and_capped


def causal(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = IGNORED,
    num_items_in_batch: int | Tensor | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    *,
    in_fixed_order: bool = False,
) -> Tensor:
    """Mean cross entropy of ``hidden[T, H] @ weight[V, H].T`` against the shifted ``labels[T]``, in float32.

    Logits are multiplied by ``scale``, then replaced by ``softcap * tanh(logits / softcap)``. If
    ``num_items_in_batch`` is given, the sum of the losses is divided by it instead of by the number of labels. If every
    label is ignored, the loss and its gradients are zero. Gradients reach ``hidden``, ``weight`` and ``bias``; those of
    weight and bias are summed in float32. Under autocast the logits are computed in its dtype.

    Raises:
        TypeError: hidden, weight and bias differ in dtype, and autocast is off.
    """
    divisor: Any = num_items_in_batch
    if divisor is None:
        divisor = (labels != ignore_index).sum().clamp_min(1)
    labels = labels.long()
    hidden, weight, bias = product_operands("chunk_loss", hidden=hidden, weight=weight, bias=bias)
    differentiate = torch.is_grad_enabled()  # read here: inside a Function, grad mode is always off
    total = _SumOfLosses.apply(
        hidden, weight, bias, labels, ignore_index, softcap, scale, differentiate, in_fixed_order
    )
    return total / divisor


causal_in_fixed_order = partial(causal, in_fixed_order=True)


class _SumOfLosses(Function):
    """The sum of the losses. Forward saves the gradients of the sum, not of the mean.

    The gradients of the mean over 131072 tokens would underflow in float16 before a loss scaler could scale them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        ignore_index: int,
        softcap: float | None,
        scale: float | None,
        differentiate: bool,
        in_fixed_order: bool,
    ) -> Tensor:
        product = linear if in_fixed_order else F.linear
        wanted = [differentiate and needed for needed in ctx.needs_input_grad[:3]]
        dhidden = torch.zeros_like(hidden, memory_format=torch.contiguous_format) if wanted[0] else None
        dweight = torch.zeros_like(weight, dtype=torch.float32) if wanted[1] else None
        dbias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and wanted[2] else None
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for rows in chunks(hidden.shape[0], weight.shape[0], hidden.device):
            states, counts = hidden[rows], labels[rows] != ignore_index  # [rows, H], [rows]
            targets = torch.where(counts, labels[rows], 0)  # any valid index: ignored rows are zeroed below
            logits, slope = scaled_and_capped(product(states, weight, bias), softcap, scale)
            losses, dlogits = _losses(logits, targets, hidden.dtype, any(wanted))
            del logits
            # Not in place: torch 2.11 compiles a result that was changed in place as two outputs, with zero gradients.
            total = total + torch.where(counts, losses, 0.0).sum()
            if dlogits is None:
                continue
            if slope is not None:  # chain rule through scale and softcap
                dlogits *= slope
            if dbias is not None:
                dbias += (dlogits * counts.unsqueeze(1)).sum(dim=0, dtype=torch.float32)
            if dhidden is not None:
                dhidden[rows] = (dlogits @ weight) * counts.unsqueeze(1)
            if dweight is not None:
                add_product(dweight, dlogits.t(), states * counts.unsqueeze(1))
            del dlogits  # otherwise it would exist until the next chunk's logits are computed
        summed = (None if each is None else kept_for_backward(each, hidden.dtype) for each in (dweight, dbias))
        ctx.save_for_backward(dhidden, *summed)
        ctx.dtype = hidden.dtype
        return total

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, dtotal: Tensor) -> tuple[Tensor | None, ...]:
        gradients = [None if saved is None else scaled(saved, dtotal, ctx.dtype) for saved in ctx.saved_tensors]
        return *gradients, None, None, None, None, None, None


def _losses(logits: Tensor, targets: Tensor, dtype: torch.dtype, differentiate: bool) -> tuple[Tensor, Tensor | None]:
    """Each row's loss in float32; and its gradient by ``logits[rows, V]`` in ``dtype``, if ``differentiate``."""
    targets = targets.unsqueeze(1)
    log_probabilities = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    picked = log_probabilities.gather(1, targets)
    if not differentiate:
        return -picked.squeeze(1), None
    # Two passes: exp with an `out` of another dtype would allocate a float32 temporary of this size.
    dlogits = log_probabilities.exp_().to(dtype)
    # softmax - 1 at the label, computed as expm1 of the log probability, which is accurate near 0.
    return -picked.squeeze(1), dlogits.scatter_(1, targets, picked.expm1().to(dtype))
