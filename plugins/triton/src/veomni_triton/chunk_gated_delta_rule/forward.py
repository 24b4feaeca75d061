"""The kernels of forward, one after the other. Backward begins with the first of them again."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from veomni_ops.sizes import ceil_div
from veomni_triton.chunk_gated_delta_rule.call import Call
from veomni_triton.chunk_gated_delta_rule.corrections import corrections_kernel
from veomni_triton.chunk_gated_delta_rule.outputs import outputs_kernel
from veomni_triton.chunk_gated_delta_rule.states import states_kernel


@dataclass(frozen=True)
class Corrections:
    """What forward and backward both need of the chunks; see the kernels that write it."""

    x: Tensor
    w: Tensor
    inverse: Tensor | None
    write_scale: Tensor
    left: Tensor
    before: Tensor


def corrected(call: Call, initial: Tensor | None, final: Tensor | None, keeps_inverse: bool) -> Corrections:
    """The corrections of all tokens, and the states before chunks; those after the last are written into ``final``."""
    (key_width, value_width), heads = call.widths, call.value_heads
    launch, size = call.launches, call.chunk
    x, w, left = call.per_token(value_width), call.per_token(key_width), call.per_chunk()
    inverse, write_scale = call.per_chunk(size, size) if keeps_inverse else None, call.per_token()
    before = call.per_chunk(key_width, value_width)
    if call.count:
        corrections_kernel[(heads * call.count,)](
            call.k,
            call.v,
            call.g,
            call.beta,
            call.chunks,
            x,
            w,
            x if inverse is None else inverse,
            write_scale,
            left,
            *call.k.stride()[1:3],
            *call.v.stride()[1:3],
            *call.g.stride()[1:],
            *call.beta.stride()[1:],
            *call.sizes,
            NORMED=call.normed,
            KEEPS_INVERSE=keeps_inverse,
            **call.shared(launch.corrections),
        )
    shared = call.shared(launch.states)
    states_kernel[(ceil_div(value_width, shared["V"]) * heads * call.sequences,)](
        call.k,
        w,
        x,
        write_scale,
        left,
        call.chunks,
        call.spans,
        left if initial is None else initial,
        before,
        left if final is None else final,
        *call.k.stride()[1:3],
        *call.sizes,
        HAS_INITIAL=initial is not None,
        HAS_FINAL=final is not None,
        **shared,
    )
    return Corrections(x, w, inverse, write_scale, left, before)


def write_outputs(call: Call, corrections: Corrections, out: Tensor) -> None:
    """The outputs of all tokens."""
    shared = call.shared(call.launches.outputs)
    outputs_kernel[(ceil_div(call.widths[1], shared["V"]) * call.value_heads * call.count,)](
        call.q,
        call.k,
        call.g,
        corrections.x,
        corrections.before,
        call.chunks,
        out,
        call.scale,
        *call.q.stride()[1:3],
        *call.k.stride()[1:3],
        *call.g.stride()[1:],
        *call.sizes,
        NORMED=call.normed,
        **shared,
    )
