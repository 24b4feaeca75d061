"""The kernels as operators ``veomni_triton::causal_conv1d*``, without autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from veomni_ops.torch_operators import operator
from veomni_triton.causal_conv1d import channels_adjacent, positions_adjacent
from veomni_triton.causal_conv1d.launch import (
    CHANNELS_BACKWARD,
    CHANNELS_FORWARD,
    POSITIONS_BACKWARD,
    POSITIONS_FORWARD,
)
from veomni_triton.causal_conv1d.layout import (
    adjacent_channels,
    adjacent_positions,
    empty_like,
    has_adjacent_positions,
)
from veomni_triton.partial_sums import sum_partials

_INPUTS = "Tensor x, Tensor weight, Tensor? bias, Tensor? seq_idx, bool has_silu"


def _convolved(x: Tensor, weight: Tensor, bias: Tensor | None, seq_idx: Tensor | None, has_silu: bool) -> Tensor:
    y, width = empty_like(x), weight.shape[1]
    others = (weight.contiguous(), _contiguous(bias), _contiguous(seq_idx), has_silu, y)
    if y.numel():
        with torch.cuda.device_of(x):
            if has_adjacent_positions(x):
                positions_adjacent.forward(adjacent_positions(x), *others, POSITIONS_FORWARD.of_width(width))
            else:
                channels_adjacent.forward(adjacent_channels(x), *others, CHANNELS_FORWARD.of_width(width))
    return y


def _gradients(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, seq_idx: Tensor | None, has_silu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dx, dweight, dbias = _gradients_like(dy, x, weight, bias)
    width = weight.shape[1]
    others = (weight.contiguous(), _contiguous(bias), _contiguous(seq_idx), has_silu, dx)
    if not dx.numel():
        return dx, dweight.zero_(), dbias.zero_()
    with torch.cuda.device_of(x):
        if has_adjacent_positions(x):
            partials = positions_adjacent.backward(
                adjacent_positions(dy), adjacent_positions(x), *others, POSITIONS_BACKWARD.of_width(width)
            )
        else:
            dy, x = adjacent_channels(dy), adjacent_channels(x)
            partials = channels_adjacent.backward(dy, x, *others, CHANNELS_BACKWARD.of_width(width))
        sum_partials(partials[:, :-1], dweight.t())
        sum_partials(partials[:, -1:], dbias[None])
    return dx, dweight, dbias


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _convolved_like(x: Tensor, *_: object) -> Tensor:
    return empty_like(x)


def _gradients_like(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, *_: object
) -> tuple[Tensor, Tensor, Tensor]:
    of_bias = weight if bias is None else bias
    return empty_like(x), weight.new_empty(weight.shape), of_bias.new_empty(weight.shape[:1])


causal_conv1d = operator(f"veomni_triton::causal_conv1d({_INPUTS}) -> Tensor y", _convolved, _convolved_like)
causal_conv1d_gradients = operator(
    f"veomni_triton::causal_conv1d_gradients(Tensor dy, {_INPUTS}) -> (Tensor dx, Tensor dweight, Tensor dbias)",
    _gradients,
    _gradients_like,
)
