"""cross_entropy_loss by Liger: the causal loss one chunk of tokens at a time, the classifier's on a copy of its logits.

Both compute their gradients in forward, in the memory of the logits, which are no longer needed then. They compute the
gradients of the sum of the losses; backward multiplies them by the incoming gradient, which contains the division by
the number of items. Where the graph is kept for another backward, it multiplies a copy of them: Liger's own backward
scales in place at any rate, so a second one would scale twice, and it synchronizes with the host to find out whether it
has to scale.

Forward can't be captured in a CUDA graph: the library's functions read the number of labels on the host, although
nothing here needs it.

Shapes: T tokens, H hidden size, V vocabulary; B sequences and C classes of a classifier.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor, library
from torch.autograd import Function

from veomni_core.kernels import IGNORED, first_derivatives_only, product_operands
from veomni_liger.chunks import chunk_multiple
from veomni_liger.loading import part

_linear_cross_entropy = part("fused_linear_cross_entropy", "fused_linear_cross_entropy_forward")
_cross_entropy = part("cross_entropy", "cross_entropy_forward")
_multiply_in_place = part("utils", "element_mul_kernel")
_WIDEST_BLOCK = 32768
# Liger sums the weight's gradient in the weight's dtype. float16 overflows at 65504, about 2048 summands of 32 each; so
# at most this many tokens are summed in float16.
_FLOAT16_TOKENS = 2048


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
    dtype, as Liger does; in float16 over at most 2048 tokens, and these partial sums in float32. Under autocast,
    hidden, weight and bias are cast to its dtype.

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


# Custom operators, opaque to ``torch.compile``. They can't return ``None``: a gradient that isn't requested is empty.
_LIBRARY = library.Library("veomni_liger", "FRAGMENT")
_LIBRARY.define(
    "causal_sum(Tensor hidden, Tensor weight, Tensor? bias, Tensor labels, int ignore_index, float? softcap, "
    "bool train, bool train_weight) -> (Tensor total, Tensor dhidden, Tensor dweight, Tensor dbias)"
)
_LIBRARY.define(
    "class_sum(Tensor logits, Tensor labels, int ignore_index, bool train) -> (Tensor total, Tensor dlogits)"
)
_LIBRARY.define("scaled(Tensor gradient, Tensor factor) -> Tensor")
_LIBRARY.define("scale(Tensor(a!) gradient, Tensor factor) -> ()")


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
    (tokens, width), vocabulary = hidden.shape, weight.shape[0]
    # Checked on the device: the host doesn't wait.
    known = ((labels >= 0) & (labels < vocabulary)) | (labels == ignore_index)
    torch._assert_async(known.all(), f"a label is neither in [0, {vocabulary}) nor {ignore_index}")
    if not tokens:  # Liger would divide by a chunk size of zero
        return tuple(x.zero_() for x in _causal_sum_like(hidden, weight, bias, labels, 0, None, train, train_weight))
    # float16: split the tokens, so that Liger's sums over them don't overflow. See _FLOAT16_TOKENS.
    at_once = min(tokens, _FLOAT16_TOKENS) if hidden.dtype == torch.float16 else tokens
    parts = []
    with torch.no_grad(), torch.cuda.device_of(hidden):
        for states, targets in zip(hidden.split(at_once), labels.split(at_once), strict=True):
            total, _, _, _, *gradients = _linear_cross_entropy(
                states,
                weight,
                targets,
                bias=bias,
                ignore_index=ignore_index,
                reduction="sum",
                softcap=softcap,
                compute_gradients=train,
                weight_requires_grad=train_weight,
                chunk_mem_const=chunk_multiple(at_once, width, vocabulary, hidden.element_size()),
            )
            parts.append((total, *(hidden.new_empty(0) if gradient is None else gradient for gradient in gradients)))
    return _together(parts, hidden.dtype)


def _together(parts: list[tuple[Tensor, ...]], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Combines the results of all token splits; in float16, sums the gradients of weight and bias in float32."""
    totals, dhidden, dweight, dbias = zip(*parts, strict=True)
    if dtype != torch.float16:
        return parts[0]
    return sum(totals), torch.cat(dhidden), *(sum(part.float() for part in sums) for sums in (dweight, dbias))


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
    return hidden.new_empty((), dtype=torch.float32), torch.empty_like(hidden), *sums


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


for _name, _implementation, _fake in (
    ("causal_sum", _causal_sum_of, _causal_sum_like),
    ("class_sum", _class_sum_of, _class_sum_like),
    ("scaled", _scaled_of, _scaled_like),
    ("scale", _scale_of, lambda *_: None),
):
    _LIBRARY.impl(_name, _implementation, "CompositeExplicitAutograd")
    library.register_fake(f"veomni_liger::{_name}", _fake, lib=_LIBRARY)
_causal_sum = torch.ops.veomni_liger.causal_sum.default
_class_sum = torch.ops.veomni_liger.class_sum.default
_scaled = torch.ops.veomni_liger.scaled.default
_scale = torch.ops.veomni_liger.scale.default
