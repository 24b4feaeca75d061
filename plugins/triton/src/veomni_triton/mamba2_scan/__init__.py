"""mamba2_scan in Triton: matrix products within chunks of tokens, a state from chunk to chunk.

Forward saves its inputs alone. Backward computes the states again, then their gradient from the last chunk to the
first, and then all chunks side by side.

Every sum has a fixed order. Products take operands of the inputs' dtype (float32 for narrow heads) and add up in
float32; decays, time steps and their gradients are float32, and log-decays are added up in float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from veomni_core.kernels import first_derivatives_only, without_autocast
from veomni_ops.mamba2_scan import check_call
from veomni_triton.mamba2_scan.operators import mamba2_scan_forward, mamba2_scan_gradients

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def standard(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: Sequence[float] = (0.0, math.inf),
    return_final_states: bool = False,
    seq_idx: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The output ``[B, S, H, P]`` and the final states ``[B, H, P, N]`` or ``None``, in float32.

    Takes ``x``, ``B`` and ``C`` of float32, bfloat16 and float16, which are multiplied in the widest of theirs, and in
    float32 if heads or states are narrow; and everything else in any floating dtype. Gradients of all floating-point
    inputs, from both results.

    Raises:
        TypeError: ``x``, ``B`` or ``C`` is of another dtype.
        ValueError: shapes don't fit together.
    """
    check_call(x, dt, A, B, C, D, dt_bias, initial_states, dt_limit, seq_idx)
    if not {x.dtype, B.dtype, C.dtype} <= set(_DTYPES):
        raise TypeError(f"x, B and C are {x.dtype}, {B.dtype} and {C.dtype}; give float32, bfloat16 or float16")
    inputs = (x, dt, A, B, C, D, dt_bias, initial_states)
    settings = (dt_softplus, *map(float, dt_limit))
    output, final = _Scan.apply(*inputs, seq_idx, settings, return_final_states)
    return output, final if return_final_states else None


class _Scan(Function):
    @staticmethod
    @without_autocast
    def forward(ctx: Any, *call: Any) -> tuple[Tensor, Tensor]:
        *tensors, settings, keeps_final = call
        output, final = mamba2_scan_forward(*tensors, *settings, keeps_final)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        ctx.settings, ctx.keeps_final = settings, keeps_final
        if not keeps_final:
            ctx.mark_non_differentiable(final)
        return output, final

    @staticmethod
    @first_derivatives_only
    @without_autocast
    def backward(ctx: Any, doutput: Tensor | None, dfinal: Tensor | None = None) -> tuple[Tensor | None, ...]:
        dfinal = dfinal if ctx.keeps_final else None
        if doutput is None and dfinal is None:
            return (None,) * 11
        tensors = ctx.saved_tensors
        gradients = iter(mamba2_scan_gradients(doutput, dfinal, *tensors, *ctx.settings))
        each = (None if x is None else next(gradients) for x in tensors[:8])
        wanted = (x if is_wanted else None for x, is_wanted in zip(each, ctx.needs_input_grad, strict=False))
        return *wanted, None, None, None
