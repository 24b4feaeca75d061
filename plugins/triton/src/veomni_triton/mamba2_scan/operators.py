"""Forward and backward as operators ``veomni_triton::mamba2_scan_*``, without autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from veomni_ops.torch_operators import operator
from veomni_triton.mamba2_scan.backward import write_gradients
from veomni_triton.mamba2_scan.call import Call, token_rows
from veomni_triton.mamba2_scan.forward import scanned, write_outputs

_INPUTS = (
    "Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? dt_bias, Tensor? initial_states,"
    " Tensor? seq_idx, bool softplus, float least, float most"
)


def _forward(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    initial_states: Tensor | None,
    seq_idx: Tensor | None,
    softplus: bool,
    least: float,
    most: float,
    keeps_final: bool,
) -> tuple[Tensor, Tensor]:
    """The outputs; the final states, or an empty tensor."""
    output, final = _results(x, B, keeps_final)
    call = Call(x, dt, A, B, C, D, dt_bias, seq_idx, softplus, least, most).laid_out()
    initial = None if initial_states is None else initial_states.contiguous()
    with torch.cuda.device_of(x):
        chunks = scanned(call, initial, final if keeps_final else None)
        if output.numel():
            write_outputs(call, chunks, output)
    return output, final


def _gradients(
    doutput: Tensor | None,
    dfinal: Tensor | None,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    initial_states: Tensor | None,
    seq_idx: Tensor | None,
    softplus: bool,
    least: float,
    most: float,
) -> list[Tensor]:
    """The gradients of all floating-point inputs that are there, in their order."""
    call = Call(x, dt, A, B, C, D, dt_bias, seq_idx, softplus, least, most).laid_out()
    inputs = {"x": x, "dt": dt, "A": A, "B": B, "C": C, "D": D, "dt_bias": dt_bias, "initial_states": initial_states}
    into = {name: each.new_empty(each.shape) for name, each in inputs.items() if each is not None}
    initial = None if initial_states is None else initial_states.contiguous()
    dout = torch.zeros_like(call.x) if doutput is None else token_rows(doutput)
    with torch.cuda.device_of(x):
        chunks = scanned(call, initial, None)
        write_gradients(call, chunks, dout, None if dfinal is None else dfinal.contiguous(), into)
    return list(into.values())


def _results(x: Tensor, B: Tensor, keeps_final: bool) -> tuple[Tensor, Tensor]:
    batch, _, heads, width = x.shape
    shape = (batch, heads, width, B.shape[3]) if keeps_final else (0,)
    return tuple(x.new_empty(each, dtype=torch.float32) for each in (x.shape, shape))  # type: ignore[return-value]


def _results_like(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, *others: object) -> tuple[Tensor, Tensor]:
    return _results(x, B, bool(others[-1]))


def _gradients_like(doutput: Tensor | None, dfinal: Tensor | None, *inputs: object) -> list[Tensor]:
    return [each.new_empty(each.shape) for each in inputs[:8] if isinstance(each, Tensor)]


mamba2_scan_forward = operator(
    f"veomni_triton::mamba2_scan_forward({_INPUTS}, bool keeps_final) -> (Tensor output, Tensor final)",
    _forward,
    _results_like,
)
mamba2_scan_gradients = operator(
    f"veomni_triton::mamba2_scan_gradients(Tensor? doutput, Tensor? dfinal, {_INPUTS}) -> Tensor[]",
    _gradients,
    _gradients_like,
)
