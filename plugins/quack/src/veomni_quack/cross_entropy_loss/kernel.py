"""The loss: the function that is bound."""

from __future__ import annotations

import torch
from torch import Tensor

from veomni_core.kernels import IGNORED, product_operands
from veomni_quack.compiling import check_dtypes
from veomni_quack.cross_entropy_loss.operators import forward


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
    """Mean cross entropy of ``hidden[T, H] @ weight[V, H].T + bias[V]`` against ``labels[T]``, a float32 scalar.

    ``scale`` multiplies the logits, then ``softcap`` replaces them by ``softcap * tanh(logits / softcap)``. If
    ``num_items_in_batch`` is given, the sum of the losses is divided by it instead of by the number of labels. If every
    label is ignored, the loss and its gradients are 0. Operands are bfloat16 or float16; under autocast they are cast
    to its dtype. Logits are rounded to that dtype; everything after them is float32.

    Gradients reach ``hidden``, ``weight`` and ``bias``. They are computed together with the loss, so the logits are
    computed once; backward scales them. Saved until then: dweight in float32, ``V * H`` values, and the last chunk's
    dlogits.

    Raises:
        TypeError: hidden and weight are not both bfloat16, or both float16.
        RuntimeError: a label is neither in ``[0, V)`` nor ``ignore_index``; on a GPU at the next synchronization.
    """
    hidden, weight, bias = product_operands("quack", hidden=hidden, weight=weight, bias=bias)
    check_dtypes("quack", hidden, weight)
    # Read here: inside the operator, grad mode is off.
    learns = torch.is_grad_enabled()
    wants_hidden = learns and hidden.requires_grad
    wants_weights = learns and (weight.requires_grad or (bias is not None and bias.requires_grad))
    labels = labels.long()
    total: Tensor = forward(hidden, weight, labels, bias, ignore_index, softcap, scale, wants_hidden, wants_weights)[0]
    if num_items_in_batch is not None:
        return total / num_items_in_batch
    return total / (labels != ignore_index).sum().clamp_min(1)
