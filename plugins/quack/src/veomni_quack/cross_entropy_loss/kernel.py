"""The loss, as it is bound."""

from __future__ import annotations

import torch
from torch import Tensor

from veomni_core.ops.autocast import product_operands
from veomni_quack.compiling import check_dtypes
from veomni_quack.cross_entropy_loss.operators import forward


def causal(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    num_items_in_batch: int | Tensor | None = None,
    softcap: float | None = None,
    scale: float | None = None,
) -> Tensor:
    """Mean cross entropy of ``hidden[T, H] @ weight[V, H].T + bias[V]`` against ``labels[T]``, a float32 scalar.

    ``scale`` multiplies the logits, then ``softcap`` bounds them by ``softcap * tanh(logits / softcap)``. With
    ``num_items_in_batch`` the sum is divided by it instead. Without any label that counts the loss is 0, with zero
    gradients. bfloat16 and float16, under autocast its dtype; logits are rounded to that, everything after them is
    float32.

    Gradients reach ``hidden``, ``weight`` and ``bias``; they are computed together with the loss, so that the logits
    are computed once, and scaled in backward. Until then the weight's gradient is held in float32, ``V * H`` values,
    and the gradient of the last chunk's logits.

    Raises:
        TypeError: hidden and weight are not both of one of these dtypes.
        RuntimeError: a label is neither in ``[0, V)`` nor ``ignore_index``; on a GPU at the next wait for it.
    """
    hidden, weight, bias = product_operands("quack", hidden=hidden, weight=weight, bias=bias)
    check_dtypes("quack", hidden, weight)
    learns = torch.is_grad_enabled()
    wants_hidden = learns and hidden.requires_grad
    wants_weights = learns and (weight.requires_grad or (bias is not None and bias.requires_grad))
    total: Tensor = forward(hidden, weight, labels, bias, ignore_index, softcap, scale, wants_hidden, wants_weights)[0]
    if num_items_in_batch is not None:
        return total / num_items_in_batch
    return total / (labels != ignore_index).sum().clamp_min(1)
