"""The loss as an opaque operator, and how autograd joins it: gradients come with the loss, backward scales them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, library

from veomni_quack.cross_entropy_loss import chunks, library_calls


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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The sum of the losses, and its gradients by hidden, weight and bias; empty ones where they aren't wanted."""
    operands = (hidden.contiguous(), weight, labels.contiguous(), bias)
    return chunks.loss_and_gradients(
        *operands, ignore_index, softcap, scale, wants_hidden, wants_weights, calls=library_calls
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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    def float32(*shape: int) -> Tensor:
        return hidden.new_empty(shape, dtype=torch.float32)

    return (
        float32(),
        hidden.new_empty(hidden.shape if wants_hidden else 0),
        float32(*weight.shape) if wants_weights else float32(0, 0),
        float32(len(weight) if wants_weights and bias is not None else 0),
    )


@library.custom_op("veomni_quack::scaled", mutates_args=())
def _scaled(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """``gradient * factor`` in float32, rounded to ``dtype`` as it is written: no float32 copy of it is made."""
    return torch.mul(gradient, factor.view(1), out=torch.empty_like(gradient, dtype=dtype))


@_scaled.register_fake
def _(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(gradient, dtype=dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, weight, _, bias, *_ = inputs
    _, *gradients = output
    ctx.dtypes = (weight.dtype, None if bias is None else bias.dtype)
    ctx.save_for_backward(*gradients)
    ctx.mark_non_differentiable(*gradients)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dtotal: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    dhidden, dweight, dbias = ctx.saved_tensors
    weight_dtype, bias_dtype = ctx.dtypes
    given = []
    for gradient, dtype, wanted in (
        (dhidden, dhidden.dtype, ctx.needs_input_grad[0]),
        (dweight, weight_dtype, ctx.needs_input_grad[1]),
        (dbias, bias_dtype, ctx.needs_input_grad[3]),
    ):
        given.append(_scaled(gradient, dtotal, dtype) if wanted else None)
    return given[0], given[1], None, given[2], None, None, None, None, None


forward.register_autograd(_gradients, setup_context=_save)
