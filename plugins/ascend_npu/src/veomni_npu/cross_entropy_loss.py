"""Causal linear cross entropy, one chunk of tokens at a time: not all logits exist at once.

Forward computes a chunk's gradients while its logits exist; backward only scales them. ``labels`` are already shifted.
A sequence classifier's loss, whose labels are not shifted, is another variant and stays eager.

Shapes: T tokens, H hidden size, V vocabulary, rows = tokens of one chunk.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from veomni_core.kernels import IGNORED, first_derivatives_only, product_operands

# Bytes of float32 logits held at a time. Not tuned: no NPU was available.
CHUNK_BYTES = 1 << 30
_FEWEST_ROWS = 128


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

    Logits are multiplied by ``scale``, then replaced by ``softcap * tanh(logits / softcap)``, in float32. If
    ``num_items_in_batch`` is given, the sum of the losses is divided by it instead of by the number of labels. If every
    label is ignored, the loss and its gradients are zero. Gradients reach ``hidden``, ``weight`` and ``bias``; those of
    weight and bias are summed in float32. Under autocast the logits are computed in its dtype.

    Raises:
        TypeError: hidden, weight and bias differ in dtype, and autocast is off.
    """
    hidden, weight, bias = product_operands("npu", hidden=hidden, weight=weight, bias=bias)
    divisor: Any = num_items_in_batch
    if divisor is None:
        divisor = (labels != ignore_index).sum().clamp_min(1)
    labels = labels.long()
    differentiate = torch.is_grad_enabled()  # read here: inside a Function, grad mode is always off
    total = _SumOfLosses.apply(hidden, weight, bias, labels, ignore_index, softcap, scale, differentiate)
    return total / divisor


class _SumOfLosses(Function):
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
    ) -> Tensor:
        wanted = [differentiate and needed for needed in ctx.needs_input_grad[:3]]
        dhidden = torch.zeros_like(hidden, memory_format=torch.contiguous_format) if wanted[0] else None
        dweight = torch.zeros_like(weight, dtype=torch.float32) if wanted[1] else None
        dbias = torch.zeros_like(weight[:, 0], dtype=torch.float32) if wanted[2] else None
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        chunk = max(_FEWEST_ROWS, CHUNK_BYTES // (4 * weight.shape[0]))
        for start in range(0, hidden.shape[0], chunk):
            rows = slice(start, start + chunk)
            logits, slope = _logits(F.linear(hidden[rows], weight, bias).float(), softcap, scale)
            losses, dlogits = _losses(logits, labels[rows], ignore_index)
            # Not in place: torch 2.11 compiles a result that was changed in place as two, with zero gradients.
            total = total + losses.sum()
            if not any(wanted):
                continue
            dlogits *= slope  # chain rule through scale and softcap
            if dbias is not None:
                dbias += dlogits.sum(dim=0)
            dlogits = dlogits.to(hidden.dtype)
            if dhidden is not None:
                dhidden[rows] = dlogits @ weight
            if dweight is not None:
                dweight += dlogits.t() @ hidden[rows]
        ctx.save_for_backward(dhidden, dweight, dbias)
        ctx.dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        return total

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, dtotal: Tensor) -> tuple[Tensor | None, ...]:
        gradients = [
            None if gradient is None else (gradient * dtotal).to(dtype)
            for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return *gradients, None, None, None, None, None


def _logits(logits: Tensor, softcap: float | None, scale: float | None) -> tuple[Tensor, Tensor | float]:
    """The logits after scale and softcap, and their derivative by the unscaled logits."""
    slope: Tensor | float = 1.0 if scale is None else scale
    logits = logits * slope
    if softcap is None:
        return logits, slope
    bounded = torch.tanh(logits / softcap)
    return softcap * bounded, (1.0 - bounded.square()) * slope


def _losses(logits: Tensor, labels: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Each row's loss, 0 for an ignored label, and the gradient of the losses' sum by ``logits[rows, V]``."""
    counts = (labels != ignore_index).unsqueeze(1)
    targets = torch.where(counts, labels.unsqueeze(1), 0)
    log_probabilities = torch.log_softmax(logits, dim=-1)
    picked = log_probabilities.gather(1, targets)
    # softmax - 1 at the label, computed as expm1 of the log probability, which is accurate near 0.
    dlogits = log_probabilities.exp().scatter(1, targets, picked.expm1())
    return torch.where(counts, -picked, 0.0), torch.where(counts, dlogits, 0.0)
