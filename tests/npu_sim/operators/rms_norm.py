"""npu_rms_norm: ``y = self / sqrt(mean(self^2) + epsilon) * gamma`` in float32, rounded once."""

from __future__ import annotations

import torch
from torch import Tensor

from npu_sim.operators.limits import require, require_dims, require_dtype, require_same_dtype

NAME = "npu_rms_norm"
SCHEMAS = {
    "npu_rms_norm": "(Tensor input, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)",
    "npu_rms_norm_backward": "(Tensor dy, Tensor input, Tensor gamma, Tensor rstd) -> (Tensor, Tensor)",
}


def npu_rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """The normed ``x`` in its dtype, and the reciprocal of the root mean square in float32.

    Limits: x has 2 to 8 dimensions, gamma its last ones, and its dtype or float32. (The library's documentation admits
    x's dtype alone; that of aclnnRmsNorm and aclnnRmsNormGrad, which it calls, lists float32 with each dtype of x.)
    """
    require_dtype(NAME, "self", x)
    require_dtype(NAME, "gamma", gamma, (x.dtype, torch.float32))
    require_dims(NAME, "self", x, tuple(range(2, 9)))
    require(
        0 < gamma.dim() <= x.dim() and x.shape[-gamma.dim() :] == gamma.shape,
        f"{NAME}: gamma of shape {tuple(gamma.shape)} is not the end of self's shape {tuple(x.shape)}",
    )
    rstd = torch.rsqrt(x.float().square().mean(_normed(gamma), keepdim=True) + epsilon)
    return (x.float() * rstd * gamma.float()).to(x.dtype), rstd


def npu_rms_norm_backward(dy: Tensor, x: Tensor, gamma: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of x in its dtype, and gamma's in float32."""
    require_same_dtype(NAME, dy=dy, self=x)
    normed, weighted = x.float() * rstd, dy.float() * gamma.float()
    dx = rstd * (weighted - normed * (weighted * normed).mean(_normed(gamma), keepdim=True))
    leading = tuple(range(x.dim() - gamma.dim()))
    dgamma = dy.float() * normed
    return dx.to(x.dtype), dgamma.sum(leading) if leading else dgamma


def _normed(gamma: Tensor) -> tuple[int, ...]:
    return tuple(range(-gamma.dim(), 0))


META = KERNELS = {"npu_rms_norm": npu_rms_norm, "npu_rms_norm_backward": npu_rms_norm_backward}


def _save(ctx, inputs, output) -> None:
    x, gamma, _ = inputs
    ctx.save_for_backward(x, gamma, output[1])


def _gradients(ctx, dy: Tensor, drstd: Tensor) -> tuple[Tensor | None, ...]:
    x, gamma, rstd = ctx.saved_tensors
    return *torch.ops.npu.npu_rms_norm_backward(dy, x, gamma, rstd), None


AUTOGRAD = {"npu_rms_norm": (_save, _gradients)}
