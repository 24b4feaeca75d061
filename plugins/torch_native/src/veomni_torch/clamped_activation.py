"""gpt-oss's activation between an expert's projections, in float32; saves only its input for backward."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from veomni_core.kernels import first_derivatives_only
from veomni_ops.contract import compute_dtype
from veomni_torch.fixed_order import sigmoid


def clamped_activation(both: Tensor, alpha: float, limit: float, interleaved: bool, up_offset: float) -> Tensor:
    """``(clamp(up) + up_offset) * g * sigmoid(alpha * g)``, ``g = min(gate, limit)``, of ``both[N, 2I]``: ``[N, I]``.

    Computed and returned in float32 (float64 for float64 inputs): with every step rounded to bfloat16, the gradients
    would miss the contract's tolerance.

    Args:
        both: Gate and up, ``[N, 2I]``: the two halves of the columns, or alternating columns if ``interleaved``.
        limit: Gate is clamped to at most ``limit``, up to ``[-limit, limit]``.
    """
    result: Tensor = _ClampedActivation.apply(both.to(compute_dtype(both)), alpha, limit, interleaved, up_offset)
    return result


class _ClampedActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, both: Tensor, alpha: float, limit: float, interleaved: bool, up_offset: float) -> Tensor:
        ctx.save_for_backward(both)
        ctx.settings = alpha, limit, interleaved, up_offset
        gate, up = _halves(both, interleaved)
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return (up + up_offset) * (gate * sigmoid(gate * alpha))

    @staticmethod
    @partial(first_derivatives_only, op="moe_experts")
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None, None, None]:
        (both,) = ctx.saved_tensors
        alpha, limit, interleaved, up_offset = ctx.settings
        gate, up = _halves(both, interleaved)
        bounded = gate.clamp(max=limit)
        share = torch.sigmoid(bounded * alpha)
        dgate = upstream * (up.clamp(-limit, limit) + up_offset) * share * (1 + alpha * bounded * (1 - share))
        dup = upstream * bounded * share
        # No gradient where the value was clamped.
        dgate, dup = torch.where(gate <= limit, dgate, 0.0), torch.where(up.abs() <= limit, dup, 0.0)
        dboth = torch.stack((dgate, dup), dim=-1).flatten(-2) if interleaved else torch.cat((dgate, dup), dim=-1)
        return dboth, None, None, None, None


def _halves(both: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Gate and up, views of ``both[N, 2I]``, each ``[N, I]``."""
    if interleaved:
        return both[..., ::2], both[..., 1::2]
    gate, up = both.chunk(2, dim=-1)
    return gate, up
