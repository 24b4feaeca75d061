"""The kernels of forward, one after the other. Backward begins with the first of them again."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from veomni_ops.sizes import ceil_div
from veomni_triton.mamba2_scan.call import Call
from veomni_triton.mamba2_scan.outputs import outputs_kernel, scores_kernel
from veomni_triton.mamba2_scan.states import states_kernel
from veomni_triton.mamba2_scan.steps import HEADS, steps_kernel


@dataclass(frozen=True)
class Chunks:
    """What forward and backward both need of the chunks; see the kernels that write it."""

    steps: Tensor
    high: Tensor
    low: Tensor
    parts: Tensor | None
    before: Tensor

    @property
    def numbers(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What kernels are given of the time steps."""
        return self.steps, self.high, self.low, self.steps if self.parts is None else self.parts


def scanned(call: Call, initial: Tensor | None, final: Tensor | None) -> Chunks:
    """The time steps, and the states before chunks; those after the last are written into ``final``."""
    is_packed = call.seq_idx is not None
    steps, high, low = call.per_token(3)
    parts = call.per_place(call.launches.chunk, dtype=torch.int32) if is_packed else None
    chunks = Chunks(steps, high, low, parts, call.states())
    if call.places:
        steps_kernel[(call.places, ceil_div(call.heads, HEADS))](
            call.dt,
            call.A,
            steps if call.bias is None else call.bias,
            steps if call.seq_idx is None else call.seq_idx,
            *chunks.numbers,
            call.least,
            call.most,
            *call.dt.stride(),
            *((0, 0) if call.seq_idx is None else call.seq_idx.stride()),
            *call.sizes[:3],
            HAS_BIAS=call.bias is not None,
            SOFTPLUS=call.softplus,
            PACKED=is_packed,
            L=call.launches.chunk,
            H=HEADS,
        )
    launch = call.launches.states
    across, along = call.tiles(launch)
    if programs := across * along * call.batch * call.heads:
        states_kernel[(programs,)](
            call.x,
            call.B,
            *chunks.numbers,
            steps if initial is None else initial,
            chunks.before,
            steps if final is None else final,
            *call.x.stride()[1:3],
            *call.B.stride()[1:3],
            *call.sizes,
            HAS_INITIAL=initial is not None,
            HAS_FINAL=final is not None,
            PACKED=is_packed,
            **call.shared(launch),
        )
    return chunks


def products(call: Call, one: Tensor, other: Tensor) -> Tensor:
    """The product of B and C, in the given order, of each chunk and group."""
    size = call.launches.chunk
    scores = call.per_place(call.groups, size, size)
    scores_kernel[(call.places * call.groups,)](
        one,
        other,
        scores,
        *one.stride()[1:3],
        *other.stride()[1:3],
        call.length,
        call.chunks,
        call.groups,
        **call.of_states(call.launches.scores),
    )
    return scores


def write_outputs(call: Call, chunks: Chunks, out: Tensor) -> None:
    """The outputs of all tokens."""
    launch = call.launches.outputs
    outputs_kernel[(call.places * call.heads, call.tiles(launch)[0])](
        call.x,
        call.C,
        call.A if call.D is None else call.D,
        products(call, call.C, call.B),
        *chunks.numbers,
        chunks.before,
        out,
        *call.x.stride()[1:3],
        *call.C.stride()[1:3],
        *call.sizes,
        HAS_D=call.D is not None,
        PACKED=call.seq_idx is not None,
        **call.shared(launch),
    )
