"""One rank's part of a vocabulary-parallel loss, one chunk of tokens at a time: not all of its logits exist at once.

The loss of a token depends on every rank's part, so no gradient can be computed in forward. Forward keeps one number
for each token, and backward computes the logits again.

Shapes: T tokens, H hidden size, Vs words of this shard, rows = tokens of one chunk.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from veomni_core.kernels import IGNORED, first_derivatives_only, product_operands
from veomni_torch.logit_chunks import add_product, chunks, scaled_and_capped


def vocabulary_parallel(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    first_word: int,
    bias: Tensor | None = None,
    ignore_index: int = IGNORED,
    softcap: float | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """``log_sum_exp[T]`` over the words ``weight[Vs, H]``, and ``label_logit[T]`` where the label is one of them.

    Both are float32, and 0 for a token whose label is ignored. ``label_logit`` is 0 too where the label is outside of
    ``first_word`` to ``first_word + Vs``. Gradients reach ``hidden``, ``weight`` and ``bias``; those of weight and bias
    are summed in float32. Under autocast the logits are computed in its dtype.

    Raises:
        TypeError: hidden, weight and bias differ in dtype, and autocast is off.
    """
    hidden, weight, bias = product_operands("chunk_loss", hidden=hidden, weight=weight, bias=bias)
    counts = labels != ignore_index
    here = counts & (labels >= first_word) & (labels < first_word + weight.shape[0])
    words = torch.where(here, labels.long() - first_word, 0)  # any row of the shard where the label is outside
    log_sum_exp, label_logit = _Parts.apply(hidden, weight, bias, counts, here, words, softcap, scale)
    return log_sum_exp, label_logit


class _Parts(Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        counts: Tensor,
        here: Tensor,
        words: Tensor,
        softcap: float | None,
        scale: float | None,
    ) -> tuple[Tensor, Tensor]:
        log_sum_exp = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        label_logit = torch.empty_like(log_sum_exp)
        for rows in chunks(hidden.shape[0], weight.shape[0], hidden.device):
            logits, _ = scaled_and_capped(F.linear(hidden[rows], weight, bias), softcap, scale)
            logits = logits.float()  # [rows, Vs]
            label_logit[rows] = logits.gather(1, words[rows].unsqueeze(1)).squeeze(1)
            log_sum_exp[rows] = torch.logsumexp(logits, dim=1)
            del logits  # otherwise it would exist until the next chunk's logits are computed
        # Not in place: torch 2.11 compiles a result that was changed in place as two outputs, with zero gradients.
        log_sum_exp = log_sum_exp.masked_fill(~counts, 0.0)
        label_logit = label_logit.masked_fill(~here, 0.0)
        ctx.save_for_backward(hidden, weight, bias, counts, here, words, log_sum_exp)
        ctx.options = softcap, scale
        return log_sum_exp, label_logit

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, dlog_sum_exp: Tensor, dlabel_logit: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, counts, here, words, log_sum_exp = ctx.saved_tensors
        dlog_sum_exp, dlabel_logit = dlog_sum_exp.masked_fill(~counts, 0.0), dlabel_logit.masked_fill(~here, 0.0)
        magnitude = _magnitude(dlog_sum_exp, dlabel_logit)
        dlog_sum_exp, dlabel_logit = dlog_sum_exp / magnitude, dlabel_logit / magnitude
        dhidden = torch.empty_like(hidden, memory_format=torch.contiguous_format) if ctx.needs_input_grad[0] else None
        dweight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        dbias = torch.zeros_like(bias, dtype=torch.float32) if ctx.needs_input_grad[2] else None
        for rows in chunks(hidden.shape[0], weight.shape[0], hidden.device):
            states = hidden[rows].masked_fill(~counts[rows].unsqueeze(1), 0.0)  # [rows, H]
            logits, slope = scaled_and_capped(F.linear(states, weight, bias), *ctx.options)
            # Softmax over all words times the upstream gradient, minus the label's: in float32, as both may be close.
            dlogits = logits.float().sub(log_sum_exp[rows].unsqueeze(1)).exp_()  # [rows, Vs]
            del logits
            dlogits.mul_(dlog_sum_exp[rows].unsqueeze(1))
            dlogits.scatter_add_(1, words[rows].unsqueeze(1), dlabel_logit[rows].unsqueeze(1))
            if slope is not None:  # chain rule through scale and softcap
                dlogits.mul_(slope)
                del slope
            # After the product with 0: the logits of an ignored token are NaN where the weight isn't finite.
            dlogits = dlogits.to(hidden.dtype).masked_fill_(~counts[rows].unsqueeze(1), 0.0)
            if dbias is not None:
                dbias += dlogits.sum(dim=0, dtype=torch.float32)
            if dhidden is not None:
                dhidden[rows] = (dlogits @ weight) * magnitude
            if dweight is not None:
                add_product(dweight, dlogits.t(), states)
            del dlogits
        dweight = None if dweight is None else dweight.mul_(magnitude).to(weight.dtype)
        dbias = None if dbias is None else dbias.mul_(magnitude).to(bias.dtype)
        return dhidden, dweight, dbias, None, None, None, None, None


def _magnitude(*gradients: Tensor) -> Tensor:
    """A power of two; divided by it, ``gradients`` are small enough for float16 and not smaller than they need be.

    Without it, the gradient of a mean over 131072 tokens times a word's probability would underflow in float16, and one
    of a scaled loss would overflow. In between it is 1: a product that is denormal loses bits where it is multiplied.
    """
    largest = torch.stack([each.abs().amax() if each.numel() else each.new_zeros(()) for each in gradients]).amax()
    above = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent)
    return above.clamp_max(1.0) * (above / _MOST).clamp_min(1.0)


_MOST = 256.0  # of a gradient of one logit, which leaves float16 as much room again for products with weights
