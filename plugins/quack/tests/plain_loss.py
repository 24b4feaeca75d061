"""The three calls of the loss in plain PyTorch: what its composition is tested with."""

from __future__ import annotations

import torch
from cute_checks import check, check_matrix
from torch.nn import functional as F

from veomni_core.kernels import first_derivatives_only
from veomni_quack.cross_entropy_loss import chunks


def losses_and_gradient(logits, labels, out, ignore_index):
    check("mX", logits)
    check("mTarget", labels, 1)
    check("mLoss", out, 1)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    out.copy_(F.cross_entropy(wide, labels, ignore_index=ignore_index, reduction="none"))
    counts = (labels != ignore_index)[:, None]
    hit = torch.arange(logits.shape[1]) == labels[:, None]
    logits.copy_((logits.float().softmax(dim=-1) - hit.float()) * counts)


def _check(*operands):
    for number, operand in enumerate(operands):
        check_matrix(f"operand {number}", operand)


def add_product(dlogits, hidden, out, first):
    _check(dlogits, hidden, out)
    product = dlogits.float().T @ hidden.float()
    out.copy_(product if first else out + product)


def scaled_sum(dlogits, hidden, so_far, factor, out):
    _check(dlogits, hidden, out, *(() if so_far is None else (so_far,)))
    assert so_far is None or so_far.shape == out.shape
    product = dlogits.float().T @ hidden.float()
    out.copy_(factor * (product if so_far is None else so_far + product))


class CALLS:
    losses_and_gradient = staticmethod(losses_and_gradient)
    add_product, scaled_sum = staticmethod(add_product), staticmethod(scaled_sum)


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, labels, bias, ignore_index, softcap, scale):
        for_hidden, for_weight, _, for_bias, *_ = ctx.needs_input_grad
        wants = (for_hidden, for_weight or for_bias)
        operands = (hidden.contiguous(), weight, labels.contiguous(), bias)
        total, *found = chunks.loss_and_gradients(*operands, ignore_index, softcap, scale, *wants, calls=CALLS)
        ctx.vocabulary = len(weight)
        ctx.save_for_backward(operands[0], *found)
        return total

    @staticmethod
    @first_derivatives_only
    def backward(ctx, dtotal):
        hidden, dhidden, so_far, dbias, last = ctx.saved_tensors
        for_hidden, for_weight, _, for_bias, *_ = ctx.needs_input_grad
        return (
            (dhidden.float() * dtotal).to(hidden.dtype) if for_hidden else None,
            chunks.weight_gradient(hidden, ctx.vocabulary, so_far, last, dtotal, CALLS) if for_weight else None,
            None,
            (dbias.float() * dtotal).to(hidden.dtype) if for_bias else None,
            *(None,) * 3,
        )


def causal(hidden, weight, labels, bias=None, ignore_index=-100, num_items_in_batch=None, softcap=None, scale=None):
    """The loss on these calls: the composition that the GPU runs, without QuACK."""
    labels = labels.long()
    total = _Loss.apply(hidden, weight, labels, bias, ignore_index, softcap, scale)
    if num_items_in_batch is not None:
        return total / num_items_in_batch
    return total / (labels != ignore_index).sum().clamp_min(1)
