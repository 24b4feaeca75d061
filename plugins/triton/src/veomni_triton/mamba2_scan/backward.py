"""The kernels of backward, one after the other, on what forward computes of the chunks."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from veomni_ops.sizes import ceil_div
from veomni_triton.mamba2_scan.call import Call
from veomni_triton.mamba2_scan.forward import Chunks, products
from veomni_triton.mamba2_scan.gradients import (
    pair_gradients_kernel,
    product_gradients_kernel,
    shared_gradients_kernel,
)
from veomni_triton.mamba2_scan.states import state_gradients_kernel
from veomni_triton.mamba2_scan.steps import HEADS, step_gradients_kernel
from veomni_triton.partial_sums import sum_partials


def write_gradients(
    call: Call,
    chunks: Chunks,
    dout: Tensor,
    dfinal: Tensor | None,
    into: Mapping[str, Tensor],
) -> None:
    """The gradients of the inputs, by the names of the op's parameters, those ``into`` has."""
    launch, is_packed = call.launches, call.seq_idx is not None
    _, high, _, parts = chunks.numbers
    dafter, dinitial = call.states(), into.get("initial_states")
    across, along = call.tiles(launch.state_gradients)
    if programs := across * along * call.batch * call.heads:
        state_gradients_kernel[(programs,)](
            dout,
            call.C,
            high,
            parts,
            high if dfinal is None else dfinal,
            dafter,
            high if dinitial is None else dinitial,
            *dout.stride()[1:3],
            *call.C.stride()[1:3],
            *call.sizes,
            HAS_FINAL=dfinal is not None,
            HAS_INITIAL=dinitial is not None,
            PACKED=is_packed,
            **call.shared(launch.state_gradients),
        )
    dA, dbias, dD = (call.per_place(call.heads) for _ in range(3))
    if call.places:
        _write_gradients_of_tokens(call, chunks, dout, dafter, into, (dA, dbias, dD))
    for name, partials in (("A", dA), ("dt_bias", dbias), ("D", dD)):
        if name in into:
            sum_partials(partials.flatten(0, 1), into[name])


def _write_gradients_of_tokens(
    call: Call,
    chunks: Chunks,
    dout: Tensor,
    dafter: Tensor,
    into: Mapping[str, Tensor],
    partials: tuple[Tensor, Tensor, Tensor],
) -> None:
    launch, is_packed, size = call.launches, call.seq_idx is not None, call.launches.chunk
    dA, dbias, dD = partials
    strides = {name: getattr(call, name).stride()[1:3] for name in ("x", "B", "C")}
    step_known, written = call.per_token(2)
    pairs = torch.empty_like(step_known, dtype=torch.float64 if call.x.dtype == torch.float32 else None)
    own, each = call.slice(launch.pair_gradients), call.slice(launch.product_gradients)
    dscores = call.per_place(call.heads // own, size, size)
    pair_gradients_kernel[(call.places * (call.heads // own),)](
        call.x,
        call.B,
        call.A if call.D is None else call.D,
        dout,
        products(call, call.B, call.C),
        *chunks.numbers,
        dafter,
        into["x"],
        dD,
        dscores,
        step_known,
        written,
        pairs,
        *strides["x"],
        *strides["B"],
        *dout.stride()[1:3],
        *call.sizes,
        SLICE=own,
        HAS_D=call.D is not None,
        PACKED=is_packed,
        **call.shared(launch.pair_gradients),
    )
    state_tiles = call.tiles(launch.product_gradients)[1]
    dwritten, dread = (call.per_place(call.heads // each, size, call.widths[1]) for _ in range(2))
    read = call.per_token(state_tiles)
    over = read.new_empty(read.shape[:-1])
    product_gradients_kernel[(call.places * (call.heads // each), state_tiles)](
        call.x,
        call.C,
        dout,
        *chunks.numbers,
        chunks.before,
        dafter,
        dwritten,
        dread,
        read,
        over,
        *strides["x"],
        *strides["C"],
        *dout.stride()[1:3],
        *call.sizes,
        SLICE=each,
        PACKED=is_packed,
        **call.shared(launch.product_gradients),
    )
    shared_gradients_kernel[(call.places * call.groups, call.tiles(launch.shared_gradients)[1])](
        call.B,
        call.C,
        dscores,
        dwritten,
        dread,
        into["B"],
        into["C"],
        *strides["B"],
        *strides["C"],
        call.length,
        call.chunks,
        call.groups,
        call.heads // own // call.groups,
        call.heads // each // call.groups,
        **call.of_states(launch.shared_gradients),
    )
    step_gradients_kernel[(call.places, ceil_div(call.heads, HEADS))](
        call.dt,
        call.A,
        call.A if call.bias is None else call.bias,
        chunks.steps,
        chunks.high,
        chunks.numbers[3],
        step_known,
        written,
        pairs,
        read,
        over,
        into["dt"],
        dA,
        dbias,
        call.least,
        call.most,
        *call.dt.stride(),
        *call.sizes[:3],
        state_tiles,
        call.places * call.heads,
        HAS_BIAS=call.bias is not None,
        SOFTPLUS=call.softplus,
        PACKED=is_packed,
        L=size,
        H=HEADS,
    )
