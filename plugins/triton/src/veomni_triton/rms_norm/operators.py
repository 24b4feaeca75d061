"""The kernels as operators ``veomni_triton::rms_norm_*``, without autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from veomni_ops.torch_operators import operator
from veomni_triton.aligned_rows import aligned_rows, aligned_weight
from veomni_triton.rms_norm import whole_rows, wide_rows
from veomni_triton.rms_norm.launch import backward_launch, fits_whole, forward_launch


def _results(
    x: Tensor, weight: Tensor | None, eps: float, offset: float, round_scale: bool, round_normalised: bool
) -> tuple[Tensor, Tensor]:
    # A result that is rounded before the weight is multiplied gets the dtype of that product, as in PyTorch.
    dtype = torch.promote_types(x.dtype, weight.dtype) if weight is not None and round_normalised else x.dtype
    y = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    return y, torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)


def _forward(
    x: Tensor, weight: Tensor | None, eps: float, offset: float, round_scale: bool, round_normalised: bool
) -> tuple[Tensor, Tensor]:
    settings = (eps, offset, round_scale, round_normalised)
    y, reciprocal = _results(x, weight, *settings)
    tensors = (aligned_rows(x), aligned_weight(weight), y, reciprocal)
    width, size = x.shape[-1], x.element_size()
    with torch.cuda.device_of(x):
        if fits_whole(width, size):
            whole_rows.forward(*tensors, *settings, forward_launch(width, size))
        else:
            wide_rows.forward(*tensors, *settings)
    return y, reciprocal


def _write_gradients(
    dy: Tensor, x: Tensor, weight: Tensor | None, reciprocal: Tensor, offset: float, dx: Tensor, dweight: Tensor | None
) -> None:
    inputs = (aligned_rows(dy), aligned_rows(x), aligned_weight(weight), reciprocal)
    width, size = x.shape[-1], x.element_size()
    with torch.cuda.device_of(x):
        if fits_whole(width, size):
            whole_rows.backward(*inputs, offset, dx, dweight, backward_launch(width, size))
        else:
            wide_rows.backward(*inputs, offset, dx, dweight)


def _gradients(dy: Tensor, x: Tensor, weight: Tensor, reciprocal: Tensor, offset: float) -> tuple[Tensor, Tensor]:
    dx, dweight = _gradients_like(dy, x, weight)
    _write_gradients(dy, x, weight, reciprocal, offset, dx, dweight)
    return dx, dweight


def _input_gradient(dy: Tensor, x: Tensor, weight: Tensor | None, reciprocal: Tensor, offset: float) -> Tensor:
    dx = _input_gradient_like(dy, x)
    _write_gradients(dy, x, weight, reciprocal, offset, dx, None)
    return dx


def _gradients_like(dy: Tensor, x: Tensor, weight: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return _input_gradient_like(dy, x), torch.empty_like(weight, memory_format=torch.contiguous_format)


def _input_gradient_like(dy: Tensor, x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


rms_norm_forward = operator(
    "veomni_triton::rms_norm_forward(Tensor x, Tensor? weight, float eps, float offset, bool round_scale,"
    " bool round_normalised) -> (Tensor y, Tensor reciprocal)",
    _forward,
    _results,
)
rms_norm_gradients = operator(
    "veomni_triton::rms_norm_gradients(Tensor dy, Tensor x, Tensor weight, Tensor reciprocal, float offset)"
    " -> (Tensor dx, Tensor dweight)",
    _gradients,
    _gradients_like,
)
rms_norm_input_gradient = operator(
    "veomni_triton::rms_norm_input_gradient(Tensor dy, Tensor x, Tensor? weight, Tensor reciprocal, float offset)"
    " -> Tensor dx",
    _input_gradient,
    _input_gradient_like,
)
