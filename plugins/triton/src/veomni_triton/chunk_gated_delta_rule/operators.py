"""Forward and backward as operators ``veomni_triton::chunk_gated_delta_rule_*``, without autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from veomni_ops.chunk_gated_delta_rule import check_call
from veomni_ops.torch_operators import operator
from veomni_triton.chunk_gated_delta_rule.backward import write_gradients
from veomni_triton.chunk_gated_delta_rule.call import Call, token_rows
from veomni_triton.chunk_gated_delta_rule.chunks import most_chunks, tables, tables_of_rows
from veomni_triton.chunk_gated_delta_rule.forward import corrected, write_outputs
from veomni_triton.chunk_gated_delta_rule.launch import chunk_length
from veomni_triton.chunk_gated_delta_rule.recurrence import write_in_order

_INPUTS = "Tensor query, Tensor key, Tensor value, Tensor g, Tensor beta, Tensor? initial_state"


def _forward(
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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The outputs; the final states, or an empty tensor; and the tables of chunks, for backward."""
    bounds = check_call(query, key, value, g, beta, initial_state, cu_seqlens)
    batch, length = query.shape[:2]
    chunk = chunk_length(query.shape[3], value.shape[3], query.dtype)
    if bounds is None:
        chunks, spans = (each.clone() for each in tables_of_rows(batch, length, chunk, query.device))
    else:
        padded_to = most_chunks(batch, length, len(bounds), chunk)
        chunks, spans = (each.clone() for each in tables(bounds, chunk, query.device, padded_to))
    output, final = _results(query, value, len(spans), keeps_final)
    call = Call.of((query, key, value, g, beta), chunks, spans, scale, normed)
    initial = None if initial_state is None else initial_state.contiguous()
    with torch.cuda.device_of(query):
        if in_fixed_order:
            write_in_order(call, initial, final if keeps_final else None, output)
            return output, final, chunks, spans
        corrections = corrected(call, initial, final if keeps_final else None, keeps_inverse=False)
        if len(chunks):
            write_outputs(call, corrections, output)
    return output, final, chunks, spans


def _gradients(
    doutput: Tensor | None,
    dfinal: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    chunks: Tensor,
    spans: Tensor,
    scale: float,
    normed: bool,
    wants_initial: bool,
) -> list[Tensor]:
    """The gradients of query, key, value, g and beta, and of the initial states if they are wanted."""
    call = Call.of((query, key, value, g, beta), chunks, spans, scale, normed)
    results = _gradients_like(doutput, dfinal, query, key, value, g, beta, initial_state, *(None,) * 4, wants_initial)
    initial = None if initial_state is None else initial_state.contiguous()
    dout = torch.zeros_like(value) if doutput is None else token_rows(doutput)
    with torch.cuda.device_of(query):
        corrections = corrected(call, initial, None, keeps_inverse=True)
        write_gradients(
            call,
            corrections,
            dout,
            None if dfinal is None else dfinal.contiguous(),
            tuple(results[:5]),  # type: ignore[arg-type]
            results[5] if wants_initial else None,
        )
    return results


def _results(query: Tensor, value: Tensor, sequences: int, keeps_final: bool) -> tuple[Tensor, Tensor]:
    shape = (sequences, value.shape[2], query.shape[3], value.shape[3]) if keeps_final else (0,)
    return query.new_empty(value.shape), query.new_empty(shape, dtype=torch.float32)


def _results_like(
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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, length = query.shape[:2]
    sequences = None if cu_seqlens is None else cu_seqlens.shape[0] - 1
    count = most_chunks(batch, length, sequences, chunk_length(query.shape[3], value.shape[3], query.dtype))
    rows = batch if sequences is None else sequences
    chunks, spans = (query.new_empty((size, 2), dtype=torch.int32) for size in (count, rows))
    return *_results(query, value, rows, keeps_final), chunks, spans


def _gradients_like(
    doutput: Tensor | None,
    dfinal: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    *settings: object,
) -> list[Tensor]:
    inputs = (query, key, value, g, beta, *((initial_state,) if settings[-1] and initial_state is not None else ()))
    return [each.new_empty(each.shape) for each in inputs]


chunk_gated_delta_rule_forward = operator(
    f"veomni_triton::chunk_gated_delta_rule_forward({_INPUTS}, Tensor? cu_seqlens, float scale, bool normed,"
    " bool keeps_final, bool in_fixed_order) -> (Tensor output, Tensor final, Tensor chunks, Tensor spans)",
    _forward,
    _results_like,
)
chunk_gated_delta_rule_gradients = operator(
    f"veomni_triton::chunk_gated_delta_rule_gradients(Tensor? doutput, Tensor? dfinal, {_INPUTS}, Tensor chunks,"
    " Tensor spans, float scale, bool normed, bool wants_initial) -> Tensor[]",
    _gradients,
    _gradients_like,
)
