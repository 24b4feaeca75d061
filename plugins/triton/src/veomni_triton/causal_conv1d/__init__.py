"""causal_conv1d in Triton, fused with its bias and its activation: one pass over ``x`` forward, one over both backward.

Only the inputs are saved: backward computes the sums before the activation again. Packed sequences are kept apart by
comparing their numbers on the device; nothing waits for the host. The gradients of weight and bias are sums in float32,
in an order that the shape and the device's number of multiprocessors fix.

``x`` is read in place where its channels are adjacent, as of a transposed ``[B, S, C]``, or where its positions are and
fill whole 16-byte vectors; anything else is copied. Results are laid out as ``x`` is read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from veomni_core.kernels import first_derivatives_only
from veomni_ops.causal_conv1d import check_arguments
from veomni_triton.causal_conv1d.operators import causal_conv1d, causal_conv1d_gradients

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def standard(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    seq_idx: Tensor | None = None,
) -> Tensor:
    """The convolution of ``x [B, C, S]`` with ``weight [C, W]``, in x's dtype; any width.

    Args:
        x: of float32, bfloat16 or float16.
        weight: of any of these dtypes; its last column is that of the present position.
        bias: ``[C]``, of any of these dtypes.
        activation: ``"silu"``, also called ``"swish"``, or ``None``.
        seq_idx: integers ``[B, S]``, the number of the packed sequence that each position belongs to.

    Returns:
        ``[B, C, S]``. Gradients reach ``x``, ``weight`` and ``bias``.

    Raises:
        TypeError: another dtype.
        ValueError: shapes that don't fit together, or another activation.
        RuntimeError: second derivatives.
    """
    check_arguments(x, weight, bias, activation, seq_idx)
    for tensor in (x, weight) if bias is None else (x, weight, bias):
        if tensor.dtype not in _DTYPES:
            raise TypeError(f"causal_conv1d takes float32, bfloat16 or float16, not {tensor.dtype}")
    return _CausalConv1d.apply(x, weight, bias, seq_idx, activation is not None)


class _CausalConv1d(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, seq_idx: Tensor | None, has_silu: bool
    ) -> Tensor:
        ctx.save_for_backward(x, weight, bias, seq_idx)
        ctx.has_silu = has_silu
        return causal_conv1d(x, weight, bias, seq_idx, has_silu)

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, seq_idx = ctx.saved_tensors
        dx, dweight, dbias = causal_conv1d_gradients(dy, x, weight, bias, seq_idx, ctx.has_silu)
        return dx, dweight, dbias if bias is not None else None, None, None
