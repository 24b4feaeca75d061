"""selective_scan in Triton: channels in parallel, their states in registers, token after token.

Forward saves its inputs and the states before chunks of 64 tokens. Backward goes from the last chunk to the first, and
computes the states inside again.

Every sum has a fixed order, and all arithmetic is in float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from veomni_core.kernels import first_derivatives_only, without_autocast
from veomni_ops.selective_scan import check_call
from veomni_triton.selective_scan.operators import selective_scan_forward, selective_scan_gradients

_DTYPES = {torch.float32, torch.bfloat16, torch.float16}


def standard(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    return_final_states: bool = False,
    seq_idx: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The output ``[B, I, S]``, with channels side by side in memory, and the final states or ``None``, in float32.

    Reads ``x``, ``dt``, ``z``, ``B`` and ``C`` as they are where the numbers of a token lie side by side, and copies of
    them where they don't. Gradients of all floating-point inputs, from both results.

    Raises:
        TypeError: an input is of another dtype than float32, bfloat16 and float16.
        ValueError: shapes don't fit together.
    """
    check_call(x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx)
    inputs = (x, dt, A, B, C, D, z, dt_bias, initial_states)
    given = [each for each in inputs if each is not None]
    if other := {each.dtype for each in given} - _DTYPES:
        raise TypeError(f"an input is {other.pop()}; give float32, bfloat16 or float16")
    keeps_borders = torch.is_grad_enabled() and any(each.requires_grad for each in given)
    output, final = _Scan.apply(*inputs, seq_idx, dt_softplus, keeps_borders, return_final_states)
    return output, final if return_final_states else None


class _Scan(Function):
    @staticmethod
    @without_autocast
    def forward(ctx: Any, *call: Any) -> tuple[Tensor, Tensor]:
        *tensors, softplus, _, keeps_final = call
        output, borders, final = selective_scan_forward(*call)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(borders, *tensors)
        ctx.softplus, ctx.keeps_final = softplus, keeps_final
        if not keeps_final:
            ctx.mark_non_differentiable(final)
        return output, final

    @staticmethod
    @first_derivatives_only
    @without_autocast
    def backward(ctx: Any, doutput: Tensor | None, dfinal: Tensor | None = None) -> tuple[Tensor | None, ...]:
        dfinal = dfinal if ctx.keeps_final else None
        if doutput is None and dfinal is None:
            return (None,) * 13
        borders, *tensors = ctx.saved_tensors
        gradients = iter(selective_scan_gradients(doutput, dfinal, borders, *tensors, ctx.softplus))
        each = (None if x is None else next(gradients) for x in tensors[:9])
        wanted = (x if is_wanted else None for x, is_wanted in zip(each, ctx.needs_input_grad, strict=False))
        return *wanted, None, None, None, None
