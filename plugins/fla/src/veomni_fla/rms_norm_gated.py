"""rms_norm_gated by flash-linear-attention's gated norm, for the one variant that it computes exactly.

fla normalises, multiplies by the weight and by the gate in float32, and rounds once. That is ``sigmoid``. ``standard``
rounds before it multiplies by the weight. ``gate_first`` too, and fla's norm for it (``layernorm_gated``) does not.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from veomni_fla.loading import of_fla
from veomni_fla.pinned import pinned

# (x, gate, weight, bias, activation, residual, eps, prenorm, residual_in_fp32, is_rms_norm) -> y
Norm = Callable[..., Tensor]
Kernel = Callable[..., Tensor]
_GRAPH_BREAK = "fla chooses its launches on the host"


def sigmoid() -> Kernel:
    """The kernel by fla's ``LayerNormGatedFunction``.

    Raises:
        ImportError: fla can't be imported.
    """
    return adapted(pinned(of_fla("modules.norm.fused_norm_gate", "LayerNormGatedFunction")).apply)


def adapted(norm: Norm) -> Kernel:
    """The kernel by a function of fla's arguments."""

    def normalised(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        return norm(x, gate, weight, None, "sigmoid", None, eps, False, False, True)

    @torch.compiler.disable(reason=_GRAPH_BREAK)  # type: ignore[untyped-decorator]
    def kernel(x: Tensor, gate: Tensor, weight: Tensor, eps: float, group_size: int | None = None) -> Tensor:
        if not x.numel():
            return (x * torch.sigmoid(gate) * weight).to(x.dtype)
        # fla has one weight for all rows. Groups have one each, so each is a norm of its own.
        size = group_size or x.shape[-1]
        if size == x.shape[-1]:
            return normalised(x, gate, weight, eps)
        parts = zip(x.split(size, -1), gate.split(size, -1), weight.split(size), strict=True)
        return torch.cat([normalised(*part, eps) for part in parts], dim=-1)

    return kernel
