"""The kernels as operators ``veomni_triton::rms_norm_gated_*``, without autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from veomni_ops.torch_operators import operator
from veomni_ops.triton_gpus import gpu_of
from veomni_triton.aligned_rows import aligned_rows, aligned_weight
from veomni_triton.rms_norm_gated import whole_groups, wide_groups
from veomni_triton.rms_norm_gated.form import Form
from veomni_triton.rms_norm_gated.launch import WHOLE_GROUP, backward_launch, forward_launch

_FORM = "bool gate_first, bool sigmoid, bool rounded"


def _results(x: Tensor, gate: Tensor, weight: Tensor, eps: float, groups: int, *form: bool) -> tuple[Tensor, Tensor]:
    # A result that the weight is multiplied with last gets the dtype of that product, as in PyTorch.
    dtype = torch.promote_types(x.dtype, weight.dtype) if Form(*form).gate_first else x.dtype
    rows = x.shape[:-1].numel()
    y = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    return y, torch.empty(rows, groups, dtype=torch.float32, device=x.device)


def _forward(x: Tensor, gate: Tensor, weight: Tensor, eps: float, groups: int, *form: bool) -> tuple[Tensor, Tensor]:
    y, reciprocal = _results(x, gate, weight, eps, groups, *form)
    inputs = (aligned_rows(x), aligned_rows(gate), aligned_weight(weight))
    width = x.shape[-1] // groups
    with torch.cuda.device_of(x):
        if width <= WHOLE_GROUP:
            whole_groups.forward(*inputs, y, reciprocal, eps, Form(*form), forward_launch(width))
        else:
            wide_groups.forward(*inputs, y, reciprocal, eps, Form(*form))
    return y, reciprocal


def _write_gradients(
    dy: Tensor,
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    reciprocal: Tensor,
    form: Form,
    dx: Tensor,
    dgate: Tensor,
    dweight: Tensor | None,
) -> None:
    inputs = (aligned_rows(dy), aligned_rows(x), aligned_rows(gate), aligned_weight(weight), reciprocal)
    width = x.shape[-1] // reciprocal.shape[1]
    with torch.cuda.device_of(x):
        if width <= WHOLE_GROUP:
            launch = backward_launch(width, x.element_size(), gpu_of(x.device).shared_bytes)
            whole_groups.backward(*inputs, form, dx, dgate, dweight, launch)
        else:
            wide_groups.backward(*inputs, form, dx, dgate, dweight)


def _gradients(
    dy: Tensor, x: Tensor, gate: Tensor, weight: Tensor, reciprocal: Tensor, *form: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dx, dgate, dweight = _gradients_like(dy, x, gate, weight)
    _write_gradients(dy, x, gate, weight, reciprocal, Form(*form), dx, dgate, dweight)
    return dx, dgate, dweight


def _input_gradients(
    dy: Tensor, x: Tensor, gate: Tensor, weight: Tensor, reciprocal: Tensor, *form: bool
) -> tuple[Tensor, Tensor]:
    dx, dgate = _input_gradients_like(dy, x, gate)
    _write_gradients(dy, x, gate, weight, reciprocal, Form(*form), dx, dgate, None)
    return dx, dgate


def _gradients_like(dy: Tensor, x: Tensor, gate: Tensor, weight: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_like(x), _empty_like(gate), _empty_like(weight)


def _input_gradients_like(dy: Tensor, x: Tensor, gate: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return _empty_like(x), _empty_like(gate)


def _empty_like(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


rms_norm_gated_forward = operator(
    f"veomni_triton::rms_norm_gated_forward(Tensor x, Tensor gate, Tensor weight, float eps, int groups, {_FORM})"
    " -> (Tensor y, Tensor reciprocal)",
    _forward,
    _results,
)
rms_norm_gated_gradients = operator(
    "veomni_triton::rms_norm_gated_gradients(Tensor dy, Tensor x, Tensor gate, Tensor weight, Tensor reciprocal,"
    f" {_FORM}) -> (Tensor dx, Tensor dgate, Tensor dweight)",
    _gradients,
    _gradients_like,
)
rms_norm_gated_input_gradients = operator(
    "veomni_triton::rms_norm_gated_input_gradients(Tensor dy, Tensor x, Tensor gate, Tensor weight,"
    f" Tensor reciprocal, {_FORM}) -> (Tensor dx, Tensor dgate)",
    _input_gradients,
    _input_gradients_like,
)
