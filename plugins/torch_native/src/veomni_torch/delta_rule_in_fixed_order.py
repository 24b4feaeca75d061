"""Delta rules, token by token, with sums whose order no batch, length, padding or packing changes.

A token's step is products and sums of single elements; a sum over the key's columns adds halves, of halves. So prefill,
packed sequences and a cache's one-token step do the same arithmetic. Tokens of zeros leave a state of zeros. Backward
computes the chunks of :mod:`veomni_torch.delta_rule`, and their gradients.

Shape suffixes: ``B`` batch, ``H`` value heads, ``K`` key width, ``V`` value width.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from veomni_core.kernels import first_derivatives_only, without_autocast
from veomni_ops.contract import compute_dtype
from veomni_ops.delta_recurrence import NORM_EPS, Bounds
from veomni_torch.delta_rule import in_chunks
from veomni_torch.fixed_order import sum_of_halves
from veomni_torch.traces import refuse_traces


def in_fixed_order(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    use_qk_l2norm_in_kernel: bool,
    bounds: Bounds | None,
) -> tuple[Tensor, Tensor | None]:
    """The output in query's dtype, and the final states in float32 or ``None``; takes what ``in_chunks`` does."""
    refuse_traces("kda" if g.dim() == value.dim() else "chunk_gated_delta_rule")
    settings = (scale, output_final_state, use_qk_l2norm_in_kernel, bounds)
    output, final = _InFixedOrder.apply(query, key, value, g, beta, initial_state, settings)
    return output, final if output_final_state else None


class _InFixedOrder(Function):
    @staticmethod
    @without_autocast
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        *inputs, ctx.settings = arguments
        ctx.save_for_backward(*inputs)
        ctx.set_materialize_grads(False)
        output, final = _over_tokens(*inputs, *ctx.settings)
        if not ctx.settings[1]:
            ctx.mark_non_differentiable(final)
        return output, final

    @staticmethod
    @partial(first_derivatives_only, op="chunk_gated_delta_rule and kda")
    @without_autocast
    def backward(ctx: Any, doutput: Tensor | None, dfinal: Tensor | None = None) -> tuple[Tensor | None, ...]:
        needed, (scale, keeps_final, is_normed, bounds) = ctx.needs_input_grad[:6], ctx.settings
        inputs: list[Any] = [
            each if each is None else each.detach().requires_grad_(needs)
            for each, needs in zip(ctx.saved_tensors, needed, strict=True)
        ]
        query, key, value, g, beta, initial = inputs
        with torch.enable_grad():
            results = in_chunks(query, key, value, g, beta, scale, initial, keeps_final, is_normed, bounds)
        given = [(y, dy) for y, dy in zip(results, (doutput, dfinal), strict=True) if dy is not None]
        if not given:
            return (None,) * 7
        outputs, doutputs = zip(*given, strict=True)
        wanted = [each for each, needs in zip(inputs, needed, strict=True) if needs]
        gradients = iter(torch.autograd.grad(outputs, wanted, doutputs, allow_unused=True))
        return *(next(gradients) if needs else None for needs in needed), None


def _over_tokens(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial: Tensor | None,
    scale: float | None,
    keeps_final: bool,
    is_normed: bool,
    bounds: Bounds | None,
) -> tuple[Tensor, Tensor]:
    wide = compute_dtype(query)
    (batch, length, heads, width), key_width = value.shape, query.shape[3]
    q, k, v, decay, rate = (x.to(wide, memory_format=torch.contiguous_format) for x in (query, key, value, g, beta))
    if is_normed:
        q, k = (x * torch.rsqrt(sum_of_halves(x * x, -1) + NORM_EPS) for x in (q, k))
    q = q * (key_width**-0.5 if scale is None else scale)
    q, k = (x.repeat_interleave(heads // max(1, x.shape[2]), dim=2).unsqueeze(-1) for x in (q, k))
    decay = (decay if decay.dim() == 4 else decay.unsqueeze(-1)).exp().unsqueeze(-1)
    v, rate = v.unsqueeze(-2), rate[..., None, None]
    output = torch.empty(value.shape, dtype=query.dtype, device=query.device)
    final = q.new_zeros(batch if bounds is None else len(bounds), heads, key_width, width)
    if initial is not None:
        final.copy_(initial)
    for index, (first, last) in enumerate(bounds or ((0, length),)):
        rows = slice(None) if bounds is None else slice(index, index + 1)
        state_BHKV = final[rows]
        for t in range(first, last):
            state_BHKV = state_BHKV * decay[:, t]
            missing = (v[:, t] - sum_of_halves(state_BHKV * k[:, t], -2)) * rate[:, t]
            state_BHKV = state_BHKV + k[:, t] * missing
            output[:, t] = sum_of_halves(state_BHKV * q[:, t], -2).squeeze(-2)
        final[rows] = state_BHKV
    return output, final
