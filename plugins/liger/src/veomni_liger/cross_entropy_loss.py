"""cross_entropy_loss by Liger: the causal loss one chunk of tokens at a time, the classifier's on a copy of its logits.

Both take their gradients in forward, over the logits that they then no longer need, and as sums: backward multiplies a
copy of them by the incoming gradient over the number of items. Liger itself scales in place, so that a second backward
would scale twice, and asks the host whether it must. Forward reads the number of labels on the host
(so no CUDA graph holds it); nothing here needs that number, but the library's functions take it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor, library
from torch.autograd import Function

from veomni_core.ops.autocast import product_operands
from veomni_core.ops.first_derivatives import first_derivatives_only
from veomni_liger.chunks import chunk_multiple
from veomni_liger.loading import part

_linear_cross_entropy = part("fused_linear_cross_entropy", "fused_linear_cross_entropy_forward")
_cross_entropy = part("cross_entropy", "cross_entropy_forward")
_multiply_in_place = part("utils", "element_mul_kernel")
_WIDEST_BLOCK = 32768
# Liger sums the weight's gradient in its dtype, and float16 ends at 65504: the sum of as many numbers of 32 each.
_FLOAT16_TOKENS = 2048
IGNORED = -100


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

    Logits are multiplied by ``scale`` (which is applied to ``hidden`` and ``bias``, and rounded there), then bounded by
    ``softcap * tanh(logits / softcap)``. With ``num_items_in_batch`` the sum is divided by it. Where no label counts,
    the loss and its gradients are zero. Gradients reach ``hidden``, ``weight`` and ``bias``; those of weight and bias
    are summed over chunks in their own dtype, as by Liger, of float16 over 2048 tokens and then in float32. Under
    autocast, hidden, weight and bias take its dtype.

    Raises:
        TypeError: hidden, weight and bias differ in dtype, and autocast is off.
        RuntimeError: a label is neither in ``[0, V)`` nor ``ignore_index``; on a GPU at the next wait for it.
    """
    if scale is not None:
        hidden, bias = hidden * scale, None if bias is None else bias * scale
    hidden, weight, bias = product_operands("liger_kernel", hidden=hidden, weight=weight, bias=bias)
    total = _CausalSum.apply(hidden, weight, bias, labels, ignore_index, softcap, torch.is_grad_enabled())
    items = _counted(labels, ignore_index) if num_items_in_batch is None else num_items_in_batch
    return total / items  # type: ignore[no-any-return]


def seq_cls(logits: Tensor, labels: Tensor, ignore_index: int = IGNORED) -> Tensor:
    """Mean cross entropy of ``logits[B, C]`` against ``labels[B]``, in float32; 0 where no label counts.

    Raises:
        AssertionError: a label is neither a class nor ``ignore_index``.
    """
    total = _ClassSum.apply(logits, labels, ignore_index, torch.is_grad_enabled())
    return total / _counted(labels, ignore_index)  # type: ignore[no-any-return]


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
        # What needs a gradient is said of the inputs under no_grad too.
        ctx.wanted = [learns and needed for needed in ctx.needs_input_grad[:3]]
        train = any(ctx.wanted)
        total, *gradients = _causal_sum(hidden, weight, bias, labels, ignore_index, softcap, train, ctx.wanted[1])
        ctx.save_for_backward(*gradients)
        ctx.dtype = hidden.dtype
        return total  # type: ignore[no-any-return]

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, dtotal: Tensor) -> tuple[Tensor | None, ...]:
        saved = zip(ctx.saved_tensors, ctx.wanted, strict=True)
        gradients = [_scaled(gradient, dtotal).to(ctx.dtype) if wanted else None for gradient, wanted in saved]
        return *gradients, None, None, None, None


class _ClassSum(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, ignore_index: int, learns: bool) -> Tensor:
        total, dlogits = _class_sum(logits, labels, ignore_index, learns and ctx.needs_input_grad[0])
        ctx.save_for_backward(dlogits)
        ctx.dtype = logits.dtype
        return total  # type: ignore[no-any-return]

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, dtotal: Tensor) -> tuple[Tensor | None, ...]:
        (dlogits,) = ctx.saved_tensors
        return (dlogits * dtotal).to(ctx.dtype), None, None, None


# Operators that ``torch.compile`` keeps whole. They can't give ``None``: what isn't wanted is an empty tensor.
_LIBRARY = library.Library("veomni_liger", "FRAGMENT")
_LIBRARY.define(
    "causal_sum(Tensor hidden, Tensor weight, Tensor? bias, Tensor labels, int ignore_index, float? softcap, "
    "bool train, bool train_weight) -> (Tensor total, Tensor dhidden, Tensor dweight, Tensor dbias)"
)
_LIBRARY.define(
    "class_sum(Tensor logits, Tensor labels, int ignore_index, bool train) -> (Tensor total, Tensor dlogits)"
)
_LIBRARY.define("scaled(Tensor gradient, Tensor factor) -> Tensor")


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
    known = ((labels >= 0) & (labels < vocabulary)) | (labels == ignore_index)
    torch._assert_async(known.all(), f"a label is neither in [0, {vocabulary}) nor {ignore_index}")
    if not tokens:  # Liger divides by the size of its chunks, of which there are none
        return tuple(x.zero_() for x in _causal_sum_like(hidden, weight, bias, labels, 0, None, train, train_weight))
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
    """The loss and the gradients of all parts of the tokens; of float16 the sums of weight and bias are float32."""
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
    if not len(logits):  # Liger asks for the largest label
        return dlogits.new_zeros(()), dlogits
    dlogits.requires_grad_(train)  # asks for the gradient, which takes the copy's place
    with torch.no_grad(), torch.cuda.device_of(logits):
        total, *_ = _cross_entropy(dlogits, labels, None, ignore_index, 0.0, 0.0, "sum", None, False)
    return total, dlogits.detach()


def _class_sum_like(logits: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    dlogits = torch.empty_like(logits, dtype=torch.float32, memory_format=torch.contiguous_format)
    return dlogits.new_empty(()), dlogits


def _scaled_of(gradient: Tensor, factor: Tensor) -> Tensor:
    """The product in float32, rounded once.

    torch rounds a factor without dimensions to the gradient's dtype, and for one with a dimension it leaves its
    vectorized kernel.
    """
    product = gradient.clone(memory_format=torch.contiguous_format)
    rows, width = product.numel() // max(product.shape[-1], 1), product.shape[-1]
    if rows:
        with torch.cuda.device_of(product):
            block = min(triton.next_power_of_2(width), _WIDEST_BLOCK)
            _multiply_in_place[(rows,)](product, width, factor, width, BLOCK_SIZE=block, num_warps=8)
    return product


def _scaled_like(gradient: Tensor, _: Tensor) -> Tensor:
    return torch.empty_like(gradient, memory_format=torch.contiguous_format)


for _name, _implementation, _fake in (
    ("causal_sum", _causal_sum_of, _causal_sum_like),
    ("class_sum", _class_sum_of, _class_sum_like),
    ("scaled", _scaled_of, _scaled_like),
):
    _LIBRARY.impl(_name, _implementation, "CompositeExplicitAutograd")
    library.register_fake(f"veomni_liger::{_name}", _fake, lib=_LIBRARY)
_causal_sum = torch.ops.veomni_liger.causal_sum.default
_class_sum = torch.ops.veomni_liger.class_sum.default
_scaled = torch.ops.veomni_liger.scaled.default
