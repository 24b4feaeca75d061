"""Causal cross entropy, one chunk of tokens at a time: the logits of all tokens never exist together.

Each chunk's gradients are taken while its logits are there, so backward only scales them; nothing is projected twice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from veomni_core.ops.first_derivatives import first_derivatives_only

IGNORED = -100
# Bytes of float32 logits held at a time. On a CPU (benchmarks/chunk_sizes.py: 2 cores, T=2048, H=256, V=32000) 16, 32,
# 64 and 128 MiB took 0.71, 0.65, 0.63 and 0.70 of the time of transformers' loss, and 11, 17, 30 and 54 % of its
# memory. A GPU needs more rows to fill its matrix units: 1 GiB holds 1766 of 151936 logits.
CPU_CHUNK_BYTES, ACCELERATOR_CHUNK_BYTES = 32 << 20, 1 << 30
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

    Logits are multiplied by ``scale``, then bounded by ``softcap * tanh(logits / softcap)``. With
    ``num_items_in_batch`` the sum is divided by it. Where no label counts, the loss and its gradients are zero.
    Gradients reach ``hidden``, ``weight`` and ``bias``; those of weight and bias are summed in float32.
    """
    if num_items_in_batch is None:
        divisor: Any = (labels != ignore_index).sum().clamp_min(1)
    else:
        divisor = num_items_in_batch
    differentiate = torch.is_grad_enabled()  # of no use inside a Function, where it is always off
    return _ChunkLoss.apply(  # type: ignore[no-any-return]
        hidden, weight, bias, labels, divisor, ignore_index, softcap, scale, differentiate
    )


class _ChunkLoss(Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        divisor: int | Tensor,
        ignore_index: int,
        softcap: float | None,
        scale: float | None,
        differentiate: bool,
    ) -> Tensor:
        wanted = [differentiate and needed for needed in ctx.needs_input_grad[:3]]
        dhidden = torch.zeros_like(hidden, memory_format=torch.contiguous_format) if wanted[0] else None
        dweight = torch.zeros_like(weight, dtype=torch.float32) if wanted[1] else None
        dbias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and wanted[2] else None
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for rows in _chunks(hidden.shape[0], weight.shape[0], hidden.device):
            states, counts = hidden[rows], labels[rows] != ignore_index
            targets = torch.where(counts, labels[rows], 0)
            logits, slope = _logits(F.linear(states, weight, bias), softcap, scale)
            losses, dlogits = _losses(logits, targets, hidden.dtype, any(wanted))
            del logits
            total += torch.where(counts, losses, 0.0).sum()
            if dlogits is None:
                continue
            if slope is not None:
                dlogits *= slope
            if dbias is not None:
                dbias += (dlogits * counts.unsqueeze(1)).sum(dim=0, dtype=torch.float32)
            if dhidden is not None:
                dhidden[rows] = (dlogits @ weight) * (counts.float() / divisor).unsqueeze(1)
            if dweight is not None:
                _add_product(dweight, dlogits.t(), states * counts.unsqueeze(1))
            del dlogits  # or it would still be there while the next chunk's logits are made
        ctx.save_for_backward(
            dhidden,
            None if dweight is None else dweight.div_(divisor).to(weight.dtype),
            None if dbias is None or bias is None else dbias.div_(divisor).to(bias.dtype),
        )
        return total / divisor

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        gradients = [None if saved is None else _scaled(saved, dloss) for saved in ctx.saved_tensors]
        return *gradients, None, None, None, None, None, None


def _scaled(gradient: Tensor, factor: Tensor) -> Tensor:
    """The product in float32, rounded once; a GPU rounds a factor without dimensions to the gradient's dtype first."""
    return torch.mul(gradient, factor.reshape(1), out=torch.empty_like(gradient))


def _chunks(tokens: int, vocabulary: int, device: torch.device) -> list[slice]:
    budget = CPU_CHUNK_BYTES if device.type == "cpu" else ACCELERATOR_CHUNK_BYTES
    rows = max(_FEWEST_ROWS, budget // (4 * vocabulary))
    return [slice(start, start + rows) for start in range(0, tokens, rows)]


def _logits(logits: Tensor, softcap: float | None, scale: float | None) -> tuple[Tensor, Tensor | float | None]:
    """The logits after scale and softcap (then in float32), and their derivative by the projection (``None``: 1)."""
    slope: Tensor | float | None = scale
    if scale is not None:
        logits = logits.float() * scale
    if softcap is not None:
        bounded = torch.tanh(logits.float() / softcap)
        slope = (1.0 - bounded.square()) * (1.0 if scale is None else scale)
        logits = softcap * bounded
    return logits, slope


def _losses(logits: Tensor, targets: Tensor, dtype: torch.dtype, differentiate: bool) -> tuple[Tensor, Tensor | None]:
    """Each row's loss in float32 and, if wanted, its derivative by the logits in ``dtype``."""
    targets = targets.unsqueeze(1)
    log_probabilities = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    picked = log_probabilities.gather(1, targets)
    if not differentiate:
        return -picked.squeeze(1), None
    # In two passes, since exp with an out of another dtype makes a float32 tensor of this size for itself.
    dlogits = log_probabilities.exp_().to(dtype)
    return -picked.squeeze(1), dlogits.scatter_(1, targets, picked.expm1().to(dtype))


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """``total += a @ b`` with ``total`` in float32."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.is_cuda:  # one pass over the total where the sum of two tensors would take three
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b
