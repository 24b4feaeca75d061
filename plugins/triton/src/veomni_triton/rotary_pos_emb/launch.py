"""The launch of the rotation: how much of a sequence each program gets."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from veomni_ops.sizes import ceil_div, power_of_two
from veomni_triton.rotary_pos_emb.form import Form
from veomni_triton.rotary_pos_emb.kernel import rotate_kernel


@dataclass(frozen=True)
class Launch:
    """Each program, of ``num_warps`` warps, rotates all heads at ``positions`` consecutive positions."""

    positions: int
    num_warps: int


@lru_cache(maxsize=1024)  # a call takes a few microseconds otherwise, and lengths vary
def rotate_launch(heads: int, positions: int, width: int) -> Launch:
    """The launch in which a thread holds 64 elements of ``q``, loaded 16 bytes at a time if they are of 16 bits.

    Args:
        heads: The heads of q.
        positions: The sequence's length.
        width: The dimensions of a head.

    Of the launches that `benchmarks/rotary_pos_emb/triton_rotary_pos_emb.py --tune` tries on an H200, at the shapes of
    six families, none is faster by more than 3 %.
    """
    # q[:, :, s] padded to powers of two: a program has all heads of a position, since they share its angles.
    per_position = power_of_two(heads) * power_of_two(width)
    # By elements of a position on an H200: 4096 take 4 warps and 2 positions, 8192 take 8 and 2, 16384 take 8 and 1
    # (0.113 ms for 96 heads of 128, where 16 and 2 take 0.119), and larger ones 16 and 1.
    num_warps = min(16, max(4, min(8, per_position // 1024), per_position // 2048))
    together = max(1, 64 * 32 * num_warps // per_position)
    return Launch(min(together, power_of_two(positions)), num_warps)


def rotate(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int, form: Form, launch: Launch
) -> tuple[Tensor, Tensor]:
    """Launch the rotation of ``q`` and ``k``.

    Args:
        q: ``[B, Hq, S, D]``, or ``[B, S, Hq, D]`` with ``unsqueeze_dim=2``; of any strides.
        k: ``[B, Hk, S, D]``, or ``[B, S, Hk, D]``; without elements if Hk is 0.
        cos: ``[B or 1, S, R/2]``, one entry for each pair.
        sin: ``[B or 1, S, R/2]``.
        unsqueeze_dim: The dimension of q and k that is the heads', 1 or 2.
        form: Where the pairs are, and which way they turn.
        launch: Positions per program, and its warps.

    Raises:
        ValueError: There are angles for neither one sequence nor B.
    """
    batch, positions, pairs = q.shape[0], q.shape[3 - unsqueeze_dim], cos.shape[2]
    for name, angles in (("cos", cos), ("sin", sin)):
        if angles.shape[0] not in (1, batch):
            raise ValueError(f"{name} is for {angles.shape[0]} sequences, but q has {batch}: expected as many, or 1")
    q_out, k_out = torch.empty_like(q), torch.empty_like(k)
    q, k, cos, sin = map(loadable, (q, k, cos, sin))
    with torch.cuda.device_of(q):
        rotate_kernel[(ceil_div(positions, launch.positions) * batch,)](
            q,
            k,
            cos,
            sin,
            q_out,
            k_out,
            _strides(q, unsqueeze_dim),
            _strides(k, unsqueeze_dim),
            _angle_strides(cos),
            _angle_strides(sin),
            _strides(q_out, unsqueeze_dim),
            _strides(k_out, unsqueeze_dim),
            positions,
            -1.0 if form.backwards else 1.0,
            Q_HEADS=q.shape[unsqueeze_dim],
            K_HEADS=k.shape[unsqueeze_dim],
            HALF=pairs,
            REST=q.shape[3] - 2 * pairs,
            POSITIONS=launch.positions,
            READS_NEIGHBOURS=form.reads_neighbours,
            WRITES_NEIGHBOURS=form.writes_neighbours,
            LAST=form.last,
            num_warps=launch.num_warps,
            enable_fp_fusion=False,  # a fused multiply-add would not round the product, which the reference does
        )
    return q_out, k_out


def loadable(x: Tensor) -> Tensor:
    """``x`` as it is, or a copy if its last dimension can't be loaded 16 bytes at a time: no model lays it so.

    Triton would compile the kernel anew for each combination of such tensors.
    """
    if x.stride(-1) == 1 and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _strides(x: Tensor, unsqueeze_dim: int) -> tuple[int, int, int, int]:
    """The strides of batch, position, head and dimension, in this order for either layout."""
    strides = x.stride()
    return strides[0], strides[3 - unsqueeze_dim], strides[unsqueeze_dim], strides[3]


def _angle_strides(angles: Tensor) -> tuple[int, int, int]:
    """The strides of batch, position and pair; 0 where one sequence of angles serves the whole batch."""
    batch, position, pair = angles.stride()
    return 0 if angles.shape[0] == 1 else batch, position, pair
