"""Ways in which a tensor may lie in memory: its strides and its offset, with the same values."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Layout = Callable[[Tensor], Tensor]
CONTIGUOUS = "contiguous, with odd strides of dimensions of one"
_ELSEWHERE = 77.0  # fills the gaps between elements: not 0, so that a read from a gap changes the result


def _strided(tensor: Tensor) -> Tensor:
    around = tensor.new_full((*tensor.shape[:-1], 2 * tensor.shape[-1] + 3), _fill(tensor))
    return _filled(around[..., 3::2][..., : tensor.shape[-1]], tensor)


def _padded(tensor: Tensor) -> Tensor:
    around = tensor.new_full((*tensor.shape[:-1], tensor.shape[-1] + 9), _fill(tensor))
    return _filled(around[..., 8:-1], tensor)


def _shifted(tensor: Tensor) -> Tensor:
    around = tensor.new_full((tensor.numel() + 1,), _fill(tensor))
    return _filled(around[1:].view(tensor.shape), tensor)


def _transposed(tensor: Tensor) -> Tensor:
    return tensor.transpose(0, -1).contiguous().transpose(0, -1)


def _reordered(tensor: Tensor) -> Tensor:
    """Heads before positions, as a gradient lies that attention's kernels give: rows stay whole, and no gap is left."""
    return tensor.transpose(0, -2).contiguous().transpose(0, -2) if tensor.dim() > 2 else tensor


def _packed(tensor: Tensor) -> Tensor:
    tensor = tensor.contiguous()
    strides = (7 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided(tensor.shape, tuple(strides), tensor.storage_offset())


def _fill(tensor: Tensor) -> float | int | bool:
    return _ELSEWHERE if tensor.is_floating_point() else tensor.dtype != torch.bool


def _filled(place: Tensor, tensor: Tensor) -> Tensor:
    place.copy_(tensor)
    return place


LAYOUTS: dict[str, Layout] = {
    "every second element of a larger tensor": _strided,
    "columns of a larger tensor": _padded,
    "one element behind the start of their storage": _shifted,
    "transposed in memory": _transposed,
    CONTIGUOUS: _packed,
}
# Contracts have samples of inputs that lie so (veomni_ops.combinations.laid_out).
LAYOUTS_OF_GRADIENTS: dict[str, Layout] = {**LAYOUTS, "with their rows in another order": _reordered}
