"""npu_rotary_mul: ``r1 * input + r2 * rotated(input)`` for inputs of four dimensions."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from npu_sim.operators.limits import require, require_dims, require_dtype, require_same_dtype

NAME = "npu_rotary_mul"
SCHEMAS = {
    "npu_rotary_mul": "(Tensor input, Tensor r1, Tensor r2, str rotary_mode='half', Tensor? rotate=None) -> Tensor",
    "npu_rotary_mul_backward": (
        "(Tensor grad, Tensor input, Tensor r1, Tensor r2, str rotary_mode='half') -> (Tensor, Tensor, Tensor)"
    ),
}
LARGEST_HEAD = 896
LARGEST_BATCH_OR_HEADS = 1000
MOST_ROWS_FOR_TABLE_GRADIENTS = 1024


def npu_rotary_mul(
    x: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None
) -> Tensor:
    """Computed in float32, in the dtype of ``x``.

    Limits (without jit_compile): D even and below 896; B and N below 1000 (their product, when interleaved); r1 and r2
    of one dtype with x, and broadcast as one of 11SD, B1SD, BNSD (of BNSD; likewise of BSND and SBND). Where r1 or r2
    needs a gradient, B * N is at most 1024.
    """
    _require_limits(x, r1, r2, rotary_mode)
    rotated = _rotated(x.float(), rotary_mode) if rotate is None else x.float() @ rotate.float()
    return (r1.float() * x.float() + r2.float() * rotated).to(x.dtype)


def npu_rotary_mul_backward(
    grad: Tensor, x: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half"
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, r1 and r2, each in its shape and in the dtype of x."""
    _require_limits(x, r1, r2, rotary_mode)
    upstream = grad.float()
    dx = upstream * r1.float() + _rotated_back(upstream * r2.float(), rotary_mode)
    dr1 = (upstream * x.float()).sum_to_size(r1.shape)
    dr2 = (upstream * _rotated(x.float(), rotary_mode)).sum_to_size(r2.shape)
    return dx.to(x.dtype), dr1.to(x.dtype), dr2.to(x.dtype)


def _rotated(x: Tensor, mode: str) -> Tensor:
    if mode == "half":
        first, second = x.chunk(2, -1)
        return torch.cat((-second, first), -1)
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def _rotated_back(x: Tensor, mode: str) -> Tensor:
    """The transpose of a rotation by a quarter turn is its negative."""
    return -_rotated(x, mode)


def _require_limits(x: Tensor, r1: Tensor, r2: Tensor, mode: str) -> None:
    for name, tensor in {"input": x, "r1": r1, "r2": r2}.items():
        require_dtype(NAME, name, tensor)
        require_dims(NAME, name, tensor, (4,))
    require_same_dtype(NAME, input=x, r1=r1, r2=r2)
    require(mode in ("half", "interleave"), f"{NAME}: rotary_mode must be half or interleave, but got {mode!r}")
    head = x.shape[-1]
    require(head % 2 == 0 and head < LARGEST_HEAD, f"{NAME}: D must be even and below {LARGEST_HEAD}, but got {head}")
    require(r1.shape == r2.shape, f"{NAME}: r1 and r2 must have one shape, but got {r1.shape} and {r2.shape}")
    require(
        any(_legal_layouts(x, r1, mode)),
        f"{NAME} ({mode}): r1 of shape {tuple(r1.shape)} fits input of shape {tuple(x.shape)} in no layout of BNSD, "
        "BSND, SBND",
    )


def _legal_layouts(x: Tensor, r1: Tensor, mode: str) -> Iterator[tuple[int, int]]:
    """The sizes B and N of x, in every layout in which the call is legal."""
    if r1.shape[-1] != x.shape[-1]:
        return
    for sequence, batch, heads in ((2, 0, 1), (1, 0, 2), (0, 1, 2)):
        own, whole = (r1.shape[batch], r1.shape[heads]), (x.shape[batch], x.shape[heads])
        broadcasts = ((1, 1),) if mode == "interleave" else ((1, 1), (whole[0], 1), whole)
        largest = whole[0] * whole[1] if mode == "interleave" else max(whole)
        if r1.shape[sequence] == x.shape[sequence] and own in broadcasts and largest < LARGEST_BATCH_OR_HEADS:
            yield whole


META = KERNELS = {"npu_rotary_mul": npu_rotary_mul, "npu_rotary_mul_backward": npu_rotary_mul_backward}


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.mode, rotate = inputs
    x, r1, r2 = tensors
    require(
        not (r1.requires_grad or r2.requires_grad)
        or any(batch * heads <= MOST_ROWS_FOR_TABLE_GRADIENTS for batch, heads in _legal_layouts(x, r1, ctx.mode)),
        f"{NAME}: B * N must be at most {MOST_ROWS_FOR_TABLE_GRADIENTS} where r1 or r2 needs a gradient",
    )
    ctx.can_go_back = rotate is None
    ctx.save_for_backward(*tensors)


def _gradients(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
    require(ctx.can_go_back, f"{NAME}: a call with rotate has no backward")
    return *torch.ops.npu.npu_rotary_mul_backward(grad, *ctx.saved_tensors, ctx.mode), None, None


AUTOGRAD = {"npu_rotary_mul": (_save, _gradients)}
