"""causal_conv1d in plain PyTorch: shifted products, one tile of positions at a time, and again in backward.

Only the inputs are saved. A tile is in float32 whatever the dtype of ``x``, and small enough for a processor's cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from veomni_core.kernels import first_derivatives_only
from veomni_ops.causal_conv1d import check_arguments
from veomni_ops.contract import compute_dtype
from veomni_torch.fixed_order import silu

_CPU_TILE_BYTES = 2**18
_TILE_BYTES = 2**27
_LEAST_POSITIONS = 16  # backward computes W - 1 positions beside a tile twice


def standard(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    seq_idx: Tensor | None = None,
) -> Tensor:
    """The convolution of ``x`` ``[B, C, S]`` with ``weight`` ``[C, W]``, in x's dtype; any width, any strides."""
    check_arguments(x, weight, bias, activation, seq_idx)
    return _CausalConv1d.apply(x, weight, bias, seq_idx, activation is not None)


class _CausalConv1d(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, seq_idx: Tensor | None, has_silu: bool
    ) -> Tensor:
        ctx.save_for_backward(x, weight, bias, seq_idx)
        ctx.has_silu = has_silu
        convolution = _Convolution(x, weight, bias, seq_idx)
        result = torch.empty_like(x)
        for start, stop in _tiles(x):
            tile = convolution.at(start, stop)
            result[..., start:stop] = silu(tile) if has_silu else tile
        return result

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        x, weight, bias, seq_idx = ctx.saved_tensors
        convolution = _Convolution(x, weight, bias, seq_idx)
        dx = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        dweight = torch.zeros_like(convolution.taps) if ctx.needs_input_grad[1] else None
        dbias = torch.zeros_like(convolution.taps[:, 0]) if ctx.needs_input_grad[2] else None
        beyond = weight.shape[-1] - 1
        for start, stop in _tiles(x):
            # A position's gradient comes from the W - 1 positions after it too.
            end = min(stop + beyond, x.shape[-1])
            dtile = dy[..., start:end].to(convolution.taps.dtype)  # [B, C, end - start]
            if ctx.has_silu:
                dtile = torch.ops.aten.silu_backward(dtile, convolution.at(start, end))
            if dx is not None:
                dx[..., start:stop] = convolution.gradient_of_x(dtile, start, stop)
            if dweight is not None:
                convolution.add_gradient_of_taps(dweight, dtile, start, stop)
            if dbias is not None:
                dbias += dtile[..., : stop - start].sum(dim=(0, 2))
        dweight = None if dweight is None else dweight.to(weight.dtype)
        return dx, dweight, None if bias is None or dbias is None else dbias.to(bias.dtype), None, None


class _Convolution:
    """The convolution of one input and its gradients, for any range of positions."""

    def __init__(self, x: Tensor, weight: Tensor, bias: Tensor | None, seq_idx: Tensor | None) -> None:
        self._x, self._seq_idx = x, seq_idx
        dtype = compute_dtype(x)
        self.taps = weight.to(dtype)  # [C, W]
        self._bias = None if bias is None else bias.to(dtype)[:, None]
        self._width = weight.shape[-1]

    def at(self, start: int, stop: int) -> Tensor:
        """What the activation is applied to, at positions ``[start, stop)``: ``[B, C, stop - start]``."""
        first = max(start - self._width + 1, 0)
        seen = self._x[..., first:stop].to(self.taps.dtype)
        total = seen[..., start - first :] * self._tap(0)
        for back, begin in self._earlier(start, stop):
            earlier = seen[..., begin - back - first : stop - back - first]
            self._add(total[..., begin - start :], earlier, self._tap(back), self._other(begin, stop, back))
        return total if self._bias is None else total.add_(self._bias)

    def gradient_of_x(self, dtile: Tensor, start: int, stop: int) -> Tensor:
        """The gradient of ``x`` at ``[start, stop)``, from ``dtile``: that of :meth:`at`, up to W - 1 beyond stop."""
        total = dtile[..., : stop - start] * self._tap(0)
        for back in range(1, self._width):
            end = min(stop + back, start + dtile.shape[-1])
            if end - back <= start:
                break
            later = dtile[..., back : end - start]
            other = self._other(start + back, end, back)
            self._add(total[..., : end - back - start], later, self._tap(back), other)
        return total

    def add_gradient_of_taps(self, dtaps: Tensor, dtile: Tensor, start: int, stop: int) -> None:
        """Add to ``dtaps`` ``[C, W]`` what positions ``[start, stop)`` contribute."""
        first = max(start - self._width + 1, 0)
        seen = self._x[..., first:stop].to(self.taps.dtype)
        dtaps[:, -1] += (dtile[..., : stop - start] * seen[..., start - first :]).sum(dim=(0, 2))
        for back, begin in self._earlier(start, stop):
            product = dtile[..., begin - start : stop - start] * seen[..., begin - back - first : stop - back - first]
            if (other := self._other(begin, stop, back)) is not None:
                product.masked_fill_(other, 0.0)
            dtaps[:, self._width - 1 - back] += product.sum(dim=(0, 2))

    def _tap(self, back: int) -> Tensor:
        """The weight of the position ``back`` before the present one, ``[C, 1]``."""
        return self.taps[:, self._width - 1 - back, None]

    def _earlier(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """``(back, begin)``: the positions ``[begin, stop)`` have one ``back`` before them."""
        for back in range(1, self._width):
            if (begin := max(start, back)) < stop:
                yield back, begin

    def _other(self, begin: int, stop: int, back: int) -> Tensor | None:
        """``[B, 1, stop - begin]``: where the position ``back`` before each of these is of another sequence."""
        if self._seq_idx is None:
            return None
        return (self._seq_idx[:, begin:stop] != self._seq_idx[:, begin - back : stop - back])[:, None]

    def _add(self, total: Tensor, values: Tensor, tap: Tensor, other: Tensor | None) -> None:
        if other is None:
            total.add_(values * tap)  # rounded before the sum, as below; addcmul_ does not
        else:  # not a product with zeros: a NaN of one sequence must not reach the next
            total.add_((values * tap).masked_fill_(other, 0.0))


def _tiles(x: Tensor) -> Iterator[tuple[int, int]]:
    """The ranges of positions that are computed at once."""
    batch, channels, length = x.shape
    tile_bytes = _CPU_TILE_BYTES if x.device.type == "cpu" else _TILE_BYTES
    positions = max(tile_bytes // (4 * max(batch * channels, 1)), _LEAST_POSITIONS)
    for start in range(0, length, positions):
        yield start, min(start + positions, length)
