"""The kernels of backward, one after the other, on what forward computes of the chunks."""

from __future__ import annotations

import torch
from torch import Tensor

from veomni_ops.sizes import ceil_div
from veomni_triton.chunk_gated_delta_rule.call import Call
from veomni_triton.chunk_gated_delta_rule.forward import Corrections
from veomni_triton.chunk_gated_delta_rule.gradients import (
    key_gradients_kernel,
    product_gradients_kernel,
    query_gradients_kernel,
    shared_gradients_kernel,
)
from veomni_triton.chunk_gated_delta_rule.launch import SHARED_TILE, padded
from veomni_triton.chunk_gated_delta_rule.outputs import correction_gradients_kernel
from veomni_triton.chunk_gated_delta_rule.states import state_gradients_kernel


def write_gradients(
    call: Call,
    corrections: Corrections,
    dout: Tensor,
    dfinal: Tensor | None,
    gradients: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    dinitial: Tensor | None,
) -> None:
    """The gradients of q, k, v, g and beta, and of the initial states."""
    (key_width, value_width), heads = call.widths, call.value_heads
    launch = call.launches
    dx, read_scale, dafter = call.per_token(value_width), call.per_token(), torch.empty_like(corrections.before)
    strides = (*call.q.stride()[1:3], *call.k.stride()[1:3])
    if call.count:
        correction_gradients_kernel[(heads * call.count,)](
            call.q,
            call.k,
            call.g,
            dout,
            call.chunks,
            dx,
            read_scale,
            call.scale,
            *strides,
            *call.g.stride()[1:],
            *dout.stride()[1:3],
            *call.sizes,
            NORMED=call.normed,
            **call.shared(launch.correction_gradients),
        )
    shared = call.shared(launch.state_gradients)
    state_gradients_kernel[(ceil_div(value_width, shared["V"]) * heads * call.sequences,)](
        call.q,
        call.k,
        corrections.w,
        dout,
        dx,
        read_scale,
        corrections.write_scale,
        corrections.left,
        call.chunks,
        call.spans,
        corrections.left if dfinal is None else dfinal,
        dafter,
        corrections.left if dinitial is None else dinitial,
        *strides,
        *dout.stride()[1:3],
        *call.sizes,
        HAS_FINAL=dfinal is not None,
        HAS_INITIAL=dinitial is not None,
        **shared,
    )
    if call.count:
        dq, dk, dv, dg, dbeta = gradients
        dscores, dproducts = (call.per_chunk(call.chunk, call.chunk) for _ in range(2))
        dg_known, dbeta_known = call.per_token(), call.per_token()
        places = (*call.g.stride()[1:], *call.beta.stride()[1:])
        grid = (heads * call.count,)
        product_gradients_kernel[grid](
            call.q,
            call.k,
            call.v,
            call.g,
            call.beta,
            corrections.x,
            corrections.inverse,
            dout,
            dx,
            call.chunks,
            dscores,
            dproducts,
            dv,
            dg_known,
            dbeta_known,
            call.scale,
            *strides,
            *call.v.stride()[1:3],
            *places,
            *dout.stride()[1:3],
            *call.sizes,
            NORMED=call.normed,
            **call.shared(launch.product_gradients),
        )
        is_shared = heads > call.heads
        parts = [call.per_token(key_width) if is_shared else each for each in (dq, dk)]
        query_gradients_kernel[grid](
            call.q,
            call.k,
            call.g,
            corrections.before,
            dout,
            dscores,
            call.chunks,
            parts[0],
            dg_known,
            call.scale,
            *strides,
            *call.g.stride()[1:],
            *dout.stride()[1:3],
            *call.sizes,
            NORMED=call.normed,
            **call.shared(launch.query_gradients),
        )
        key_gradients_kernel[grid](
            call.q,
            call.k,
            call.g,
            call.beta,
            corrections.x,
            corrections.before,
            dafter,
            dx,
            dscores,
            dproducts,
            dg_known,
            dbeta_known,
            call.chunks,
            parts[1],
            dg,
            dbeta,
            call.scale,
            *strides,
            *places,
            *call.sizes,
            NORMED=call.normed,
            **call.shared(launch.key_gradients),
        )
        if is_shared:
            for each, total in zip(parts, (dq, dk), strict=True):
                _add_shared(each, total, heads // call.heads)


def _add_shared(each: Tensor, total: Tensor, group: int) -> None:
    """Into ``total [B, S, H, K]`` the sums of ``each [B, S, H * group, K]`` over the value heads of a key head."""
    width, rows = total.shape[-1], total.numel() // total.shape[-1]
    columns = padded(width)
    tile = max(1, SHARED_TILE // columns)
    shared_gradients_kernel[(ceil_div(rows, tile),)](each, total, rows, width, GROUP=group, R=tile, K=columns)
