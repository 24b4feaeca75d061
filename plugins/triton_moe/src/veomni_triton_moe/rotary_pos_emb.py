"""rotary_pos_emb: one launch for queries and keys, which loads a position's angles once for all of its heads.

The gradient of a rotation is its transpose: the same launch with the two halves of the sines swapped and negated.
Backward therefore needs only ``cos`` and ``sin``. Every product and sum is rounded, so that results equal the
reference's bit for bit.
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
    """Rotate all dimensions of queries and keys. No gradient reaches ``cos`` and ``sin``.

    Args:
        q: ``[B, Hq, S, D]``, or ``[B, S, Hq, D]`` with ``unsqueeze_dim=2``; of any strides.
        k: ``[B, Hk, S, D]``, or ``[B, S, Hk, D]``.
        cos: ``[B or 1, S, D]``.
        sin: ``[B or 1, S, D]``.
        unsqueeze_dim: The dimension of q and k that is the heads', 1 or 2.

    Returns:
        The rotated ``q`` and ``k``, in their dtypes, and with their strides where those are dense.

    Raises:
        ValueError: ``cos`` is not as wide as a head, or ``unsqueeze_dim`` is neither 1 nor 2.
    """
    if cos.shape[-1] != q.shape[-1]:
        raise ValueError(f"cos is {cos.shape[-1]} wide, expected {q.shape[-1]}, as wide as a head")
    return partial(q, k, cos, sin, unsqueeze_dim)


def partial(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """As :func:`full` with ``cos`` and ``sin`` of ``[B or 1, S, R]``: dimensions from ``R`` on are copied unchanged."""
    if unsqueeze_dim not in (1, 2):
        raise ValueError(f"unsqueeze_dim is {unsqueeze_dim}, expected 1 for [B, H, S, D] or 2 for [B, S, H, D]")
    return _RotaryPosEmb.apply(q, k, cos, sin, unsqueeze_dim, False)


class _RotaryPosEmb(Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int, transposed: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.unsqueeze_dim, ctx.transposed = unsqueeze_dim, transposed
        return _rotate(q, k, cos, sin, unsqueeze_dim, transposed)

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return *_RotaryPosEmb.apply(dq, dk, cos, sin, ctx.unsqueeze_dim, not ctx.transposed), None, None, None, None


@dataclass(frozen=True)
class Launch:
    """Each program, of ``num_warps`` warps, rotates all heads at ``positions`` consecutive positions."""

    positions: int
    num_warps: int


def rotate_launch(q: Tensor, unsqueeze_dim: int) -> Launch:
    """The launch in which a thread holds 64 elements of ``q``, loaded 16 bytes at a time if they are of 16 bits.

    Of the launches that `benchmarks/rotary_pos_emb/triton_rotary_pos_emb.py --tune` tries on an H200, none is
    faster by 1 %.
    """
    # q[:, :, s] padded to powers of two: a program has all heads of a position, since they share its angles.
    heads, positions = q.shape[unsqueeze_dim], q.shape[3 - unsqueeze_dim]
    per_position = triton.next_power_of_2(heads) * triton.next_power_of_2(q.shape[3])
    num_warps = min(16, max(4, per_position // (32 * 32)))
    together = max(1, 64 * 32 * num_warps // per_position)
    return Launch(min(together, triton.next_power_of_2(positions)), num_warps)


def rotate(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int, transposed: bool, launch: Launch
) -> tuple[Tensor, Tensor]:
    """Launch the rotation of ``q`` and ``k``, or the rotation back if ``transposed``. Shapes as in :func:`partial`."""
    batch, positions, width = q.shape[0], q.shape[3 - unsqueeze_dim], cos.shape[2]
    q_out, k_out = torch.empty_like(q), torch.empty_like(k)
    # A stride of 0 where one sequence of angles serves the whole batch: the kernel needs no case for it.
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
            enable_fp_fusion=False,  # a fused multiply-add would not round the product, which the reference does
        )
    return q_out, k_out


def _strides(x: Tensor, unsqueeze_dim: int) -> tuple[int, int, int, int]:
    """The strides of batch, position, head and dimension, in this order for either layout."""
    return x.stride(0), x.stride(3 - unsqueeze_dim), x.stride(unsqueeze_dim), x.stride(3)


# An operator, so that ``torch.compile`` doesn't trace into it. Defined through a ``Library`` rather than by
# ``custom_op``, which puts more Python around each call.
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
