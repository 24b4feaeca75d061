"""chunk_gated_delta_rule in Triton: matrix products within chunks of tokens, a state from chunk to chunk.

Forward saves its inputs alone. Backward computes the corrections and the states again, then the gradient of the state
from the last chunk to the first, and then all chunks side by side. Normalising queries and keys takes no pass over
memory: they are multiplied as they are, and their norms go into the other factor.

Every sum has a fixed order. Products take operands of the inputs' dtype and add up in float32; with float32 inputs an
operand is two numbers of TF32.

In a fixed order, forward goes from token to token (:mod:`veomni_triton.chunk_gated_delta_rule.recurrence`) instead, and
backward is the same.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from veomni_core.kernels import first_derivatives_only, without_autocast
from veomni_triton.chunk_gated_delta_rule.operators import (
    chunk_gated_delta_rule_forward,
    chunk_gated_delta_rule_gradients,
)
from veomni_triton.limits import MAX_HEAD_WIDTH

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def standard(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    in_fixed_order: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The output ``[B, S, HV, V]`` in query's dtype, and the final states ``[N, HV, K, V]`` in float32 or ``None``.

    Takes queries, keys and values of one of float32, bfloat16 and float16, with heads of at most 256 columns,
    and everything else in any floating dtype. Gradients of all floating-point inputs, from both results.

    Raises:
        TypeError: query, key and value are of different dtypes, or of another one.
        ValueError: shapes or boundaries don't fit together, or heads are wider.
    """
    if query.dtype not in _DTYPES or key.dtype != query.dtype or value.dtype != query.dtype:
        dtypes = f"{query.dtype}, {key.dtype} and {value.dtype}"
        raise TypeError(f"query, key and value are {dtypes}; give one of float32, bfloat16 and float16 for all three")
    if max(key.shape[-1], value.shape[-1]) > MAX_HEAD_WIDTH:
        widths = f"keys have {key.shape[-1]} columns and values {value.shape[-1]}"
        raise ValueError(f"{widths}; the kernel takes at most {MAX_HEAD_WIDTH}")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    output, final = _DeltaRule.apply(
        query,
        key,
        value,
        g,
        beta,
        initial_state,
        cu_seqlens,
        scale,
        use_qk_l2norm_in_kernel,
        output_final_state,
        in_fixed_order,
    )
    return output, final if output_final_state else None


standard_in_fixed_order = partial(standard, in_fixed_order=True)


class _DeltaRule(Function):
    @staticmethod
    @without_autocast
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None,
        cu_seqlens: Tensor | None,
        scale: float,
        normed: bool,
        keeps_final: bool,
        in_fixed_order: bool,
    ) -> tuple[Tensor, Tensor]:
        inputs = (query, key, value, g, beta, initial_state)
        settings = (scale, normed, keeps_final, in_fixed_order)
        output, final, chunks, spans = chunk_gated_delta_rule_forward(*inputs, cu_seqlens, *settings)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs, chunks, spans)
        ctx.settings, ctx.keeps_final = (scale, normed), keeps_final
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
        wants_initial = ctx.needs_input_grad[5]
        gradients = chunk_gated_delta_rule_gradients(doutput, dfinal, *ctx.saved_tensors, *ctx.settings, wants_initial)
        dinitial = gradients[5] if wants_initial else None
        wanted = (x if is_wanted else None for x, is_wanted in zip(gradients, ctx.needs_input_grad[:5], strict=False))
        return *wanted, dinitial, None, None, None, None, None
