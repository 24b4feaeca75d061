"""The loss as a custom operator with its autograd: forward computes the gradients too, backward scales them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, library

from veomni_core.kernels import aligned, first_derivatives_only
from veomni_quack.cross_entropy_loss import chunks, quack_calls


@library.custom_op("veomni_quack::linear_cross_entropy", mutates_args=())
def forward(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    softcap: float | None,
    scale: float | None,
    wants_hidden: bool,
    wants_weights: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns the results of :func:`veomni_quack.cross_entropy_loss.chunks.loss_and_gradients`."""
    # Checked on the device: the host doesn't wait.
    known = ((labels >= 0) & (labels < len(weight))) | (labels == ignore_index)
    torch._assert_async(known.all(), f"a label is neither in [0, {len(weight)}) nor {ignore_index}")
    operands = (hidden.contiguous(), weight, aligned(labels, labels.element_size()), bias)
    return chunks.loss_and_gradients(
        *operands, ignore_index, softcap, scale, wants_hidden, wants_weights, calls=quack_calls
    )


@forward.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    softcap: float | None,
    scale: float | None,
    wants_hidden: bool,
    wants_weights: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    def float32(*shape: int) -> Tensor:
        return hidden.new_empty(shape, dtype=torch.float32)

    (tokens, width), vocabulary = hidden.shape, len(weight)
    last = chunks.last_rows(tokens, chunks.chunk_tokens(tokens, vocabulary)) if wants_weights else 0
    return (
        float32(),
        hidden.new_empty(hidden.shape if wants_hidden else 0),
        float32(*chunks.sum_shape(tokens, width, vocabulary)) if wants_weights else float32(0, 0),
        float32(vocabulary if wants_weights and bias is not None else 0),
        hidden.new_empty(last, chunks.round_up(vocabulary)),
    )


@library.custom_op("veomni_quack::head_gradient", mutates_args=())
def _weight_gradient(hidden: Tensor, vocabulary: int, so_far: Tensor, last_dlogits: Tensor, factor: Tensor) -> Tensor:
    return chunks.weight_gradient(hidden, vocabulary, so_far, last_dlogits, factor, calls=quack_calls)


@_weight_gradient.register_fake
def _(hidden: Tensor, vocabulary: int, *_: Tensor) -> Tensor:
    return hidden.new_empty(vocabulary, hidden.shape[1])


@library.custom_op("veomni_quack::scaled", mutates_args=())
def _scaled(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """``gradient * factor`` in float32, rounded to ``dtype`` in the same kernel: no float32 copy is made."""
    return torch.mul(gradient, factor.view(1), out=torch.empty_like(gradient, dtype=dtype))


@_scaled.register_fake
def _(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(gradient, dtype=dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, _, bias, *_ = inputs
    _, *found = output  # the gradients, which forward returns only so that they can be saved
    ctx.vocabulary, ctx.bias_dtype = len(weight), None if bias is None else bias.dtype
    ctx.save_for_backward(hidden, *found)
    ctx.mark_non_differentiable(*found)
    ctx.set_materialize_grads(False)


@first_derivatives_only
def _gradients(ctx: Any, dtotal: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    hidden, dhidden, so_far, dbias, last_dlogits = ctx.saved_tensors
    for_hidden, for_weight, _, for_bias, *_ = ctx.needs_input_grad
    return (
        _scaled(dhidden, dtotal, hidden.dtype) if for_hidden else None,
        _weight_gradient(hidden, ctx.vocabulary, so_far, last_dlogits, dtotal) if for_weight else None,
        None,
        _scaled(dbias, dtotal, ctx.bias_dtype) if for_bias else None,
        *(None,) * 5,
    )


forward.register_autograd(_gradients, setup_context=_save)
