"""Forward and backward as operators ``veomni_triton::selective_scan_*``, without autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from veomni_ops.sizes import ceil_div, power_of_two
from veomni_ops.torch_operators import operator
from veomni_triton.aligned_rows import begins_aligned, compact
from veomni_triton.selective_scan.kernels import gradients_kernel, outputs_kernel
from veomni_triton.selective_scan.launch import CHUNK, GRADIENTS, OUTPUTS, Launch

_INPUTS = (
    "Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor? dt_bias,"
    " Tensor? initial_states, Tensor? seq_idx, bool softplus"
)


def _forward(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    initial_states: Tensor | None,
    seq_idx: Tensor | None,
    softplus: bool,
    keeps_borders: bool,
    keeps_final: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The outputs, the states before each chunk and the final states; empty tensors for what is not kept."""
    output, borders, final = _results(x, A, keeps_borders, keeps_final)
    rows = [_by_token(each) for each in (x, dt, x if z is None else z, B, C)]
    vectors = [_vector(each, A) for each in (A, D, dt_bias, initial_states)]
    if programs := _programs(x, OUTPUTS):
        with torch.cuda.device_of(x):
            outputs_kernel[(programs,)](
                *rows[:3],
                vectors[0],
                *rows[3:],
                *vectors[1:],
                x if seq_idx is None else seq_idx,
                output,
                borders,
                final,
                *(stride for each in rows for stride in each.stride()[:2]),
                *((0, 0) if seq_idx is None else seq_idx.stride()),
                *_sizes(x, OUTPUTS),
                HAS_BORDERS=keeps_borders,
                HAS_FINAL=keeps_final,
                **_options(A, D, z, dt_bias, initial_states, seq_idx, softplus, OUTPUTS),
            )
    return output, borders, final


def _gradients(
    doutput: Tensor | None,
    dfinal: Tensor | None,
    borders: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    initial_states: Tensor | None,
    seq_idx: Tensor | None,
    softplus: bool,
) -> list[Tensor]:
    """The gradients of all floating-point inputs that are there, in their order."""
    (batch, channels, length), state_width = x.shape, A.shape[1]
    inputs = (x, dt, A, B, C, D, z, dt_bias, initial_states)
    into = _gradients_like(doutput, dfinal, borders, *inputs)
    named = dict(zip((name for name, each in zip(_NAMES, inputs, strict=True) if each is not None), into, strict=True))
    blocks = ceil_div(channels, GRADIENTS.channels)
    programs = _programs(x, GRADIENTS)
    tokens = GRADIENTS.tokens(state_width)
    states = x.new_empty(
        (programs, CHUNK // tokens, power_of_two(state_width), GRADIENTS.channels), dtype=torch.float32
    )
    dB, dC = x.new_empty((2, blocks, batch, length, state_width), dtype=torch.float32)
    dA = x.new_empty((batch, channels, state_width), dtype=torch.float32)
    dD, dbias = x.new_empty((2, batch, channels), dtype=torch.float32)
    dout = torch.zeros_like(x) if doutput is None else doutput
    rows = [_by_token(each) for each in (dout, x, dt, x if z is None else z, B, C)]
    vectors = [_vector(each, A) for each in (A, D, dt_bias, dfinal)]
    if programs:
        with torch.cuda.device_of(x):
            gradients_kernel[(programs,)](
                rows[0],
                vectors[3],
                *rows[1:4],
                vectors[0],
                *rows[4:],
                *vectors[1:3],
                x if seq_idx is None else seq_idx,
                borders,
                states,
                named["x"],
                named["dt"],
                named.get("z", x),
                dB,
                dC,
                dA,
                dD,
                dbias,
                named.get("initial_states", x),
                *(stride for each in rows for stride in each.stride()[:2]),
                *((0, 0) if seq_idx is None else seq_idx.stride()),
                *_sizes(x, GRADIENTS),
                batch,
                HAS_FINAL=dfinal is not None,
                **_options(A, D, z, dt_bias, initial_states, seq_idx, softplus, GRADIENTS),
            )
    for name, parts in (("A", dA), ("D", dD), ("dt_bias", dbias), ("B", dB.mT), ("C", dC.mT)):
        if name in named:
            named[name].copy_(parts.sum(0))
    return into


_NAMES = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_states")


def _by_token(x: Tensor) -> Tensor:
    """``x [B, width, S]`` as ``[B, S, width]`` with what belongs to a token side by side; a copy where it isn't."""
    rows = x.mT
    return rows if (rows.stride(-1) == 1 or rows.shape[-1] == 1) and begins_aligned(rows) else compact(rows)


def _vector(x: Tensor | None, otherwise: Tensor) -> Tensor:
    return otherwise if x is None else x.contiguous()


def _programs(x: Tensor, launch: Launch) -> int:
    return x.shape[0] * ceil_div(x.shape[1], launch.channels)


def _sizes(x: Tensor, launch: Launch) -> tuple[int, int, int, int]:
    _, channels, length = x.shape
    return length, ceil_div(length, CHUNK), channels, ceil_div(channels, launch.channels)


def _options(
    A: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    initial_states: Tensor | None,
    seq_idx: Tensor | None,
    softplus: bool,
    launch: Launch,
) -> dict[str, Any]:
    """What both kernels are launched with."""
    return {
        "HAS_Z": z is not None,
        "HAS_D": D is not None,
        "HAS_BIAS": dt_bias is not None,
        "SOFTPLUS": softplus,
        "HAS_INITIAL": initial_states is not None,
        "PACKED": seq_idx is not None,
        "STATE": A.shape[1],
        "L": CHUNK,
        "T": launch.tokens(A.shape[1]),
        "K": launch.channels,
        "N": power_of_two(A.shape[1]),
        "num_warps": 1,
    }


def _results(x: Tensor, A: Tensor, keeps_borders: bool, keeps_final: bool) -> tuple[Tensor, Tensor, Tensor]:
    (batch, channels, length), state_width = x.shape, A.shape[1]
    borders = (batch, ceil_div(length, CHUNK), state_width, channels) if keeps_borders else (0,)
    final = (batch, channels, state_width) if keeps_final else (0,)
    output, *others = (x.new_empty(each, dtype=torch.float32) for each in ((batch, length, channels), borders, final))
    return output.mT, *others  # type: ignore[return-value]


def _results_like(x: Tensor, dt: Tensor, A: Tensor, *others: object) -> tuple[Tensor, Tensor, Tensor]:
    return _results(x, A, bool(others[-2]), bool(others[-1]))


def _gradients_like(doutput: Tensor | None, dfinal: Tensor | None, borders: Tensor, *inputs: object) -> list[Tensor]:
    """New tensors for the gradients; those of tensors with channels and tokens have channels side by side."""
    given = {name: each for name, each in zip(_NAMES, inputs, strict=False) if isinstance(each, Tensor)}
    by_token = ("x", "dt", "z", "B", "C")
    return [
        each.new_empty(each.mT.shape).mT if name in by_token else each.new_empty(each.shape)
        for name, each in given.items()
    ]


selective_scan_forward = operator(
    f"veomni_triton::selective_scan_forward({_INPUTS}, bool keeps_borders, bool keeps_final)"
    " -> (Tensor output, Tensor borders, Tensor final)",
    _forward,
    _results_like,
)
selective_scan_gradients = operator(
    f"veomni_triton::selective_scan_gradients(Tensor? doutput, Tensor? dfinal, Tensor borders, {_INPUTS}) -> Tensor[]",
    _gradients,
    _gradients_like,
)
