"""rotary_pos_emb: one launch for queries and keys, which loads a position's angles once for all of its heads.

The gradient of a rotation is its transpose: the same launch with the two halves of the sines swapped and negated. So
only ``cos`` and ``sin`` are saved. Products and sums are rounded one by one, as the contract's reference does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor, library
from torch.autograd import Function

from veomni_core.ops.first_derivatives import first_derivatives_only
from veomni_triton_moe.rotary_kernels import rotate_kernel


def full(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """Rotate every dimension of ``q[B, Hq, S, D]`` and ``k[B, Hk, S, D]`` by ``cos`` and ``sin`` of ``[B or 1, S, D]``.

    The results have the dtypes of ``q`` and ``k``, and their strides where those are dense. With ``unsqueeze_dim=2``
    the layout is ``[B, S, H, D]``. No gradient reaches ``cos`` and ``sin``.

    Raises:
        ValueError: ``cos`` is not as wide as a head, or ``unsqueeze_dim`` is neither 1 nor 2.
    """
    if cos.shape[-1] != q.shape[-1]:
        raise ValueError(f"cos is {cos.shape[-1]} wide, expected {q.shape[-1]}, as wide as a head")
    return partial(q, k, cos, sin, unsqueeze_dim)


def partial(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """As :func:`full`, in the first ``cos.shape[-1]`` dimensions; the others pass through unchanged."""
    if unsqueeze_dim not in (1, 2):
        raise ValueError(f"unsqueeze_dim is {unsqueeze_dim}, expected 1 for [B, H, S, D] or 2 for [B, S, H, D]")
    return _RotaryPosEmb.apply(q, k, cos, sin, unsqueeze_dim, False)  # type: ignore[no-any-return]


class _RotaryPosEmb(Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int, transposed: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.unsqueeze_dim, ctx.transposed = unsqueeze_dim, transposed
        return _rotate(q, k, cos, sin, unsqueeze_dim, transposed)  # type: ignore[no-any-return]

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return *_RotaryPosEmb.apply(dq, dk, cos, sin, ctx.unsqueeze_dim, not ctx.transposed), None, None, None, None


@dataclass(frozen=True)
class Launch:
    """Each program, of ``num_warps``, rotates all heads at ``positions`` in a row."""

    positions: int
    num_warps: int


def rotate_launch(q: Tensor, unsqueeze_dim: int) -> Launch:
    """A thread holds 64 elements of ``q`` at a time, in loads of 16 bytes if they are of 16 bits.

    Of the launches that `benchmarks/triton_rotary_pos_emb.py --tune` tries on an H200, none is faster by 1 %.
    """
    heads, positions = q.shape[unsqueeze_dim], q.shape[3 - unsqueeze_dim]
    per_position = triton.next_power_of_2(heads) * triton.next_power_of_2(q.shape[3])
    num_warps = min(16, max(4, per_position // (32 * 32)))
    together = max(1, 64 * 32 * num_warps // per_position)
    return Launch(min(together, triton.next_power_of_2(positions)), num_warps)


def rotate(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int, transposed: bool, launch: Launch
) -> tuple[Tensor, Tensor]:
    """Launch the rotation of ``q`` and ``k``, or the one back if ``transposed``."""
    batch, positions, width = q.shape[0], q.shape[3 - unsqueeze_dim], cos.shape[2]
    q_out, k_out = torch.empty_like(q), torch.empty_like(k)
    cos, sin = cos.expand(batch, -1, -1), sin.expand(batch, -1, -1)
    with torch.cuda.device_of(q):
        rotate_kernel[triton.cdiv(positions, launch.positions), batch](
            q,
            k,
            cos,
            sin,
            q_out,
            k_out,
            _strides(q, unsqueeze_dim),
            _strides(k, unsqueeze_dim),
            cos.stride(),
            sin.stride(),
            _strides(q_out, unsqueeze_dim),
            _strides(k_out, unsqueeze_dim),
            positions,
            Q_HEADS=q.shape[unsqueeze_dim],
            K_HEADS=k.shape[unsqueeze_dim],
            HALF=width // 2,
            REST=q.shape[3] - width,
            POSITIONS=launch.positions,
            TRANSPOSED=transposed,
            num_warps=launch.num_warps,
            enable_fp_fusion=False,  # a product that is fused with the sum isn't rounded
        )
    return q_out, k_out


def _strides(x: Tensor, unsqueeze_dim: int) -> tuple[int, int, int, int]:
    """Of batch, position, head and dimension."""
    return x.stride(0), x.stride(3 - unsqueeze_dim), x.stride(unsqueeze_dim), x.stride(3)


# An operator that ``torch.compile`` keeps whole; through a ``Library``, for ``custom_op`` puts more Python around it.
_LIBRARY = library.Library("veomni_triton_moe", "FRAGMENT")
_LIBRARY.define(
    "rotary_pos_emb(Tensor q, Tensor k, Tensor cos, Tensor sin, int unsqueeze_dim, bool transposed)"
    " -> (Tensor q, Tensor k)"
)


def _rotated(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int, transposed: bool
) -> tuple[Tensor, Tensor]:
    return rotate(q, k, cos, sin, unsqueeze_dim, transposed, rotate_launch(q, unsqueeze_dim))


def _outputs(q: Tensor, k: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k)


_LIBRARY.impl("rotary_pos_emb", _rotated, "CompositeExplicitAutograd")
library.register_fake("veomni_triton_moe::rotary_pos_emb", _outputs, lib=_LIBRARY)
_rotate = torch.ops.veomni_triton_moe.rotary_pos_emb.default
