"""cross_entropy_loss by Liger: the causal loss one chunk of tokens at a time, the classifier's on a copy of its logits.

Both compute their gradients in forward, in the memory of the logits, which are no longer needed then. They compute the
gradients of the sum of the losses; backward multiplies them by the incoming gradient, which contains the division by
the number of items. Where the graph is kept for another backward, it multiplies a copy of them.

The products around Liger's kernel are this file's. In Liger's own loop a chunk's tokens are a power of two, sums of
float16 overflow, and the host waits for the number of labels.

Shapes: T tokens, H hidden size, V vocabulary; B sequences and C classes of a classifier.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd import Function

from veomni_core.kernels import IGNORED, first_derivatives_only, product_operands
from veomni_liger.loading import part
from veomni_ops.head_chunks import chunks
from veomni_ops.torch_operators import operator

_losses_and_dlogits = part("cross_entropy", "liger_cross_entropy_kernel")
_cross_entropy = part("cross_entropy", "cross_entropy_forward")
_multiply_in_place = part("utils", "element_mul_kernel")
_WIDEST_BLOCK = 32768
_WARPS = 32  # of a row of logits, as Liger launches its kernel
# What its kernel can do beside: means, weights of words, smoothed labels, and more results.
_LEFT_OUT = {
    **dict.fromkeys(("weight_ptr", "z_loss_ptr", "token_accuracy_ptr", "predicted_tokens_ptr")),
    **dict.fromkeys(("HAS_WEIGHT", "RETURN_Z_LOSS", "RETURN_TOKEN_ACCURACY", "RETURN_PREDICTED_TOKENS"), False),
    **dict.fromkeys(("token_accuracy_stride", "predicted_tokens_stride"), 0),
    **dict.fromkeys(("lse_square_scale", "label_smoothing", "weight_sum"), 0.0),
    **{"reduction": "sum", "n_non_ignore": 1, "sum_non_ignore_weight": 1},
}


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

    Logits are multiplied by ``scale`` (applied to ``hidden`` and ``bias``, and rounded there), then replaced by
    ``softcap * tanh(logits / softcap)``. If ``num_items_in_batch`` is given, the sum of the losses is divided by it
    instead of by the number of labels. If every label is ignored, the loss and its gradients are zero.

    Gradients reach ``hidden``, ``weight`` and ``bias``. Those of weight and bias are summed over chunks in their own
    dtype, as Liger does; in float32 for float16, which overflows. Under autocast, hidden, weight and bias are cast to
    its dtype.

    Raises:
        TypeError: hidden, weight and bias differ in dtype, and autocast is off.
        RuntimeError: a label is neither in ``[0, V)`` nor ``ignore_index``; on a GPU at the next synchronization.
    """
    if scale is not None:
        hidden, bias = hidden * scale, None if bias is None else bias * scale
    hidden, weight, bias = product_operands("liger_kernel", hidden=hidden, weight=weight, bias=bias)
    total = _CausalSum.apply(hidden, weight, bias, labels.long(), ignore_index, softcap, torch.is_grad_enabled())
    items = _counted(labels, ignore_index) if num_items_in_batch is None else num_items_in_batch
    return total / items


def seq_cls(logits: Tensor, labels: Tensor, ignore_index: int = IGNORED) -> Tensor:
    """Mean cross entropy of ``logits[B, C]`` against ``labels[B]``, in float32; 0 if every label is ignored.

    Raises:
        AssertionError: a label is neither a class nor ``ignore_index``.
    """
    total = _ClassSum.apply(logits, labels.long(), ignore_index, torch.is_grad_enabled())
    return total / _counted(labels, ignore_index)


def _counted(labels: Tensor, ignore_index: int) -> Tensor:
    return (labels != ignore_index).sum().clamp_min(1)


class _CausalSum(Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        ignore_index: int,
        softcap: float | None,
        learns: bool,
    ) -> Tensor:
        # needs_input_grad is True under no_grad too, hence `learns`.
        ctx.wanted = [learns and needed for needed in ctx.needs_input_grad[:3]]
        train = any(ctx.wanted)
        total, *gradients = _causal_sum(hidden, weight, bias, labels, ignore_index, softcap, train, ctx.wanted[1])
        ctx.save_for_backward(*gradients)
        ctx.dtype = hidden.dtype
        return total

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, dtotal: Tensor) -> tuple[Tensor | None, ...]:
        saved = [each if wanted else None for each, wanted in zip(ctx.saved_tensors, ctx.wanted, strict=True)]
        if _are_saved_for_later():
            saved = [None if each is None else _scaled(each, dtotal) for each in saved]
        else:  # a vocabulary's gradient is hundreds of MiB, more than a chunk of logits
            for each in saved:
                if each is not None:
                    _scale(each, dtotal)
        return *(None if each is None else each.to(ctx.dtype) for each in saved), None, None, None, None


def _are_saved_for_later() -> bool:
    """Whether another backward may read what this one has saved; a graph that is traced says nothing of that."""
    return torch.compiler.is_compiling() or torch._C._autograd._get_current_graph_task_keep_graph()


class _ClassSum(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, ignore_index: int, learns: bool) -> Tensor:
        total, dlogits = _class_sum(logits, labels, ignore_index, learns and ctx.needs_input_grad[0])
        ctx.save_for_backward(dlogits)
        ctx.dtype = logits.dtype
        return total

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, dtotal: Tensor) -> tuple[Tensor | None, ...]:
        (dlogits,) = ctx.saved_tensors
        return (dlogits * dtotal).to(ctx.dtype), None, None, None


def _causal_sum_of(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    ignore_index: int,
    softcap: float | None,
    train: bool,
    train_weight: bool,
) -> tuple[Tensor, ...]:
    tokens, vocabulary = len(hidden), len(weight)
    # Checked on the device: the host doesn't wait.
    known = ((labels >= 0) & (labels < vocabulary)) | (labels == ignore_index)
    torch._assert_async(known.all(), f"a label is neither in [0, {vocabulary}) nor {ignore_index}")
    total, dhidden, dweight, dbias = _causal_sum_like(hidden, weight, bias, labels, 0, None, train, train_weight)
    for each in (dweight, dbias):
        each.zero_()
    losses = torch.zeros(tokens, dtype=torch.float32, device=hidden.device)  # Liger writes none of an ignored label
    parts = chunks(tokens, vocabulary, hidden.element_size())
    buffer = hidden.new_empty(max((part.stop - part.start for part in parts), default=0), vocabulary)
    with torch.no_grad(), torch.cuda.device_of(hidden):
        for part_T in parts:
            states_TH, logits_TV = hidden[part_T], buffer[: part_T.stop - part_T.start]
            torch.mm(states_TH, weight.t(), out=logits_TV)
            if bias is not None:
                logits_TV += bias
            _launch(logits_TV, labels[part_T], losses[part_T], ignore_index, softcap, train)
            if train:  # the logits' memory has their gradients now
                torch.mm(logits_TV, weight, out=dhidden[part_T])
                if train_weight:
                    _add_product(dweight, logits_TV.t(), states_TH)
                if bias is not None:
                    dbias += logits_TV.sum(0, dtype=dbias.dtype)
    return torch.sum(losses, 0, out=total), dhidden, dweight, dbias


def _launch(
    logits_TV: Tensor, labels_T: Tensor, losses_T: Tensor, ignore_index: int, softcap: float | None, train: bool
) -> None:
    """Write the losses of a chunk, and where it ``train``s the gradients of their sum over the logits."""
    rows, vocabulary = logits_TV.shape
    _losses_and_dlogits[(rows,)](
        X_ptr=logits_TV,
        X_stride=logits_TV.stride(0),
        Y_ptr=labels_T,
        Y_stride=labels_T.stride(0),
        loss_ptr=losses_T,
        loss_stride=losses_T.stride(0),
        n_cols=vocabulary,
        ignore_index=ignore_index,
        softcap=softcap,
        HAS_SOFTCAPPING=softcap is not None,
        HAS_GRADIENTS=train,
        BLOCK_SIZE=min(triton.next_power_of_2(vocabulary), _WIDEST_BLOCK),
        num_warps=_WARPS,
        **_LEFT_OUT,
    )


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """``total += a @ b``, of float16 in float32."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))


def _causal_sum_like(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    ignore_index: int,
    softcap: float | None,
    train: bool,
    train_weight: bool,
) -> tuple[Tensor, ...]:
    wide = torch.float32 if hidden.dtype == torch.float16 else hidden.dtype
    given = (weight if train and train_weight else None, bias if train else None)
    sums = (hidden.new_empty(0, dtype=wide) if x is None else torch.empty_like(x, dtype=wide) for x in given)
    dhidden = torch.empty_like(hidden) if train else hidden.new_empty(0)
    return hidden.new_empty((), dtype=torch.float32), dhidden, *sums


def _class_sum_of(logits: Tensor, labels: Tensor, ignore_index: int, train: bool) -> tuple[Tensor, Tensor]:
    dlogits = logits.detach().to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    if not len(logits):  # Liger takes the maximum of the labels, which fails on no labels
        return dlogits.new_zeros(()), dlogits
    dlogits.requires_grad_(train)  # makes Liger compute the gradient, which it writes over this copy
    with torch.no_grad(), torch.cuda.device_of(logits):
        total, *_ = _cross_entropy(dlogits, labels, None, ignore_index, 0.0, 0.0, "sum", None, False)
    return total, dlogits.detach()


def _class_sum_like(logits: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    dlogits = torch.empty_like(logits, dtype=torch.float32, memory_format=torch.contiguous_format)
    return dlogits.new_empty(()), dlogits


def _scaled_of(gradient: Tensor, factor: Tensor) -> Tensor:
    """``gradient * factor``, on a copy: see :func:`_scale_of`."""
    product = gradient.clone(memory_format=torch.contiguous_format)
    _scale_of(product, factor)
    return product


def _scale_of(gradient: Tensor, factor: Tensor) -> None:
    """``gradient *= factor``, multiplied in float32 and rounded once; by Liger's kernel.

    ``torch.mul`` would round a zero-dimensional factor to the gradient's dtype, and with a one-dimensional factor it
    would not use its vectorized kernel.
    """
    rows, width = gradient.numel() // max(gradient.shape[-1], 1), gradient.shape[-1]
    if rows:
        with torch.cuda.device_of(gradient):
            block = min(triton.next_power_of_2(width), _WIDEST_BLOCK)
            _multiply_in_place[(rows,)](gradient, width, factor, width, BLOCK_SIZE=block, num_warps=8)


def _scaled_like(gradient: Tensor, _: Tensor) -> Tensor:
    return torch.empty_like(gradient, memory_format=torch.contiguous_format)


# They can't return ``None``: a gradient that isn't requested is empty.
_causal_sum = operator(
    "veomni_liger::causal_sum(Tensor hidden, Tensor weight, Tensor? bias, Tensor labels, int ignore_index,"
    " float? softcap, bool train, bool train_weight) -> (Tensor total, Tensor dhidden, Tensor dweight, Tensor dbias)",
    _causal_sum_of,
    _causal_sum_like,
)
_class_sum = operator(
    "veomni_liger::class_sum(Tensor logits, Tensor labels, int ignore_index, bool train)"
    " -> (Tensor total, Tensor dlogits)",
    _class_sum_of,
    _class_sum_like,
)
_scaled = operator("veomni_liger::scaled(Tensor gradient, Tensor factor) -> Tensor", _scaled_of, _scaled_like)
_scale = operator("veomni_liger::scale(Tensor(a!) gradient, Tensor factor) -> ()", _scale_of, lambda *_: None)
