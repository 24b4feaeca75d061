"""rotary_pos_emb_vision by ``npu_rotary_mul`` in float32, as vision towers compute it."""

from __future__ import annotations

from math import prod

from torch import Tensor

from veomni_npu.rotation import rotated


def full(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate every dimension of ``q[..., S, H, D]`` and ``k[..., S, H, D]`` by ``cos`` and ``sin`` of ``[..., S, D]``.

    ``cos`` and ``sin`` have the same leading dimensions as q, or none. Computed in float32, rounded once to the dtypes
    of ``q`` and ``k``. No gradient reaches ``cos`` and ``sin``.
    """
    return _in_four_dimensions(q, cos, sin), _in_four_dimensions(k, cos, sin)


def _in_four_dimensions(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Flatten all leading dimensions into one: the operator takes four dimensions."""
    sequence, heads, width = x.shape[-3:]
    # Counted: without a patch, -1 would be ambiguous.
    batch, shared = prod(x.shape[:-3]), prod(cos.shape[:-2])
    cos, sin = (angles.float().reshape(shared, sequence, 1, width) for angles in (cos, sin))
    return rotated(x.reshape(batch, sequence, heads, width), cos, sin).view(x.shape)
