"""Delta rules, chunk by chunk: within a chunk by matrix products, from chunk to chunk by a state.

Within a chunk the corrections ``X`` of its tokens solve ``(I + A) X = beta * (v - (exp(c) * k) @ S)``. ``S`` is the
state before the chunk, ``c`` the cumulated log-decays, and ``A[i, j] = beta[i] * sum(k[i] * P[i, j] * k[j])`` for
``j < i``, with ``P[i, j]`` the decay from token ``j`` to token ``i``: one number, or one per key channel. Backward
keeps the inputs and the state before each chunk, and computes the inside of a few chunks again at a time.

Shape suffixes: ``B`` batch, ``H`` value heads, ``N`` chunks of a group, ``C`` tokens of a chunk, ``K`` key width, ``V``
value width.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from veomni_core.kernels import first_derivatives_only, without_autocast
from veomni_ops.contract import compute_dtype
from veomni_ops.delta_recurrence import Bounds
from veomni_torch.delta_chunks import Chunks, cut
from veomni_torch.delta_inside import Inside, Options, solve
from veomni_torch.traces import refuse_traces


def in_chunks(
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
    """The output in query's dtype, and the final states in float32 or ``None``.

    The arguments are those of the ops, with ``g`` of either, and what ``check_call`` says of the boundaries.
    """
    per_channel = g.dim() == value.dim()
    refuse_traces("kda" if per_channel else "chunk_gated_delta_rule")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    chunks = cut(query.shape[1], bounds, query.device)
    wide = compute_dtype(query)
    options = Options(chunks, scale, per_channel, use_qk_l2norm_in_kernel, output_final_state, wide)
    return _DeltaRule.apply(query, key, value, g, beta, initial_state, options)  # type: ignore[no-any-return]


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
        initial: Tensor | None,
        options: Options,
    ) -> tuple[Tensor, Tensor | None]:
        chunks, inputs = options.chunks, (query, key, value, g, beta)
        starts, ends = chunks.starts(), chunks.ends()
        batch, _, heads, value_width = value.shape
        matrix = (heads, query.shape[3], value_width)
        sequences = len(chunks.spans) if chunks.is_packed else batch
        # An empty sequence leaves its state as it is.
        final = _wide_copy(initial, (sequences, *matrix), options.dtype, query.device)
        output = torch.empty(value.shape, dtype=query.dtype, device=query.device)
        kept = any(ctx.needs_input_grad)
        states_BHNKV = final.new_empty(batch, heads, chunks.count if kept else 0, *matrix[1:])
        state = final
        for group in chunks.groups(_numbers(value, chunks)):
            inside = Inside.of(inputs, group, options)
            before_BHNKV = final.new_empty(batch, heads, group.stop - group.start, *matrix[1:])
            x_BHNCV = inside.written()  # becomes the corrections, chunk by chunk
            for i, n in enumerate(range(group.start, group.stop)):
                if n in starts:
                    state = final[starts[n]]
                before_BHNKV[:, :, i] = state
                right = x_BHNCV[:, :, i] - inside.reading[:, :, i] @ state
                x_BHNCV[:, :, i] = solve(inside.system[:, :, i], right)
                state = inside.left[:, :, i] * state + inside.writing[:, :, i].mT @ x_BHNCV[:, :, i]
                if n in ends:
                    final[ends[n]] = state
            chunks.write(output, inside.decayed_query @ before_BHNKV + inside.attention @ x_BHNCV, group)
            if kept:
                states_BHNKV[:, :, group] = before_BHNKV
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs, states_BHNKV)
        ctx.options, ctx.initial_dtype = options, None if initial is None else initial.dtype
        return output, final if options.keeps_final else None

    @staticmethod
    @partial(first_derivatives_only, op="chunk_gated_delta_rule and kda")
    @without_autocast
    def backward(ctx: Any, doutput: Tensor | None, dfinal: Tensor | None = None) -> tuple[Any, ...]:
        *inputs, states_BHNKV = ctx.saved_tensors
        options: Options = ctx.options
        if doutput is None and dfinal is None:
            return (None,) * 7
        chunks, value = options.chunks, inputs[2]
        starts, ends = chunks.starts(), chunks.ends()
        gradients = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs]
        sequences = len(chunks.spans) if chunks.is_packed else value.shape[0]
        shape = (sequences, value.shape[2], *states_BHNKV.shape[3:])
        dinitial = _wide_copy(dfinal, shape, options.dtype, value.device)
        dstate = dinitial
        for group in reversed(list(chunks.groups(_numbers(value, chunks)))):
            inside = Inside.of(tuple(inputs), group, options)
            before = states_BHNKV[:, :, group]
            x = solve(inside.system, inside.written() - inside.reading @ before)
            dout = torch.zeros_like(x) if doutput is None else chunks.read(doutput, group, options.dtype)
            dwritten = inside.attention.mT @ dout  # becomes the gradient of the right side, chunk by chunk
            read_back = inside.decayed_query.mT @ dout
            dafter = torch.empty_like(read_back)
            for i, n in reversed(list(enumerate(range(group.start, group.stop)))):
                if n in ends:
                    dstate = dinitial[ends[n]]
                dafter[:, :, i] = dstate
                dx = dwritten[:, :, i] + inside.writing[:, :, i] @ dstate
                dwritten[:, :, i] = solve(inside.system[:, :, i], dx, transposed=True)
                from_reading = inside.reading[:, :, i].mT @ dwritten[:, :, i]
                dstate = inside.left[:, :, i] * dstate + read_back[:, :, i] - from_reading
                if n in starts:
                    dinitial[starts[n]] = dstate
            for into, gradient in zip(gradients, inside.gradients(before, x, dout, dwritten, dafter), strict=True):
                chunks.write(into, gradient, group)
        wanted = [x if needed else None for x, needed in zip(gradients, ctx.needs_input_grad, strict=False)]
        return *wanted, dinitial.to(ctx.initial_dtype) if ctx.needs_input_grad[5] else None, None


def _numbers(value: Tensor, chunks: Chunks) -> int:
    """The size of the values of one chunk, in all rows and heads."""
    batch, _, heads, width = value.shape
    return batch * heads * width * chunks.tokens.shape[1]


def _wide_copy(states: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if states is None:
        return torch.zeros(shape, dtype=dtype, device=device)
    return states.to(dtype, copy=True, memory_format=torch.contiguous_format)
