"""Copies and sums of rows: in PyTorch on any device, and by Triton kernels on CUDA. No atomics: sums have one order."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from veomni_ops.contract import compute_dtype
from veomni_triton_moe.token_dispatch.exchange import Exchange
from veomni_triton_moe.token_dispatch.row_layout import RowLayout

OVERFLOW = -1  # the expert id in the rows of a rank that had more rows for one rank than max_tokens


def packed(hidden: Tensor, weights: Tensor, exchange: Exchange) -> tuple[Tensor, RowLayout]:
    """The rows to send ``[S, bytes]``, from ``hidden[T, H]`` and ``weights[T, K]``, and their layout."""
    layout = RowLayout(hidden.shape[1], hidden.dtype, weights.shape[1], weights.dtype)
    buffer = layout.empty(exchange.rows_sent, hidden.device)
    taken_rows(hidden, exchange, layout.hidden(buffer))
    _write_choices(weights, exchange, layout.ids(buffer), layout.weights(buffer))
    return buffer, layout


def _write_choices(weights: Tensor, exchange: Exchange, ids: Tensor, row_weights: Tensor) -> None:
    """Write what each row's rank gets of its token's choices; choices of other ranks have id ``L`` and weight 0."""
    local = exchange.ranks.local_experts
    if kernels := _kernels(weights):
        kernels.local_choices(exchange.index, weights, exchange.places, ids, row_weights, local, exchange.overflow)
        return
    if not len(weights):
        ids.fill_(local)
        row_weights.zero_()
        return
    token, rank, filled = _origins(exchange, len(weights))
    index = exchange.index[token] - rank.unsqueeze(1) * local  # [S, K]
    here = (index >= 0) & (index < local) & filled.unsqueeze(1)
    numbers = torch.where(here, index, local)
    if exchange.overflow is not None:
        numbers = torch.where(exchange.overflow, OVERFLOW, numbers)
    ids.copy_(numbers)
    row_weights.copy_(torch.where(here, weights[token], 0.0))


def taken_rows(tokens: Tensor, exchange: Exchange, rows: Tensor) -> Tensor:
    """Write the row of ``tokens[T, H]`` that each of ``rows[S, H]`` is for; zeros into padding."""
    if kernels := _kernels(tokens):
        kernels.take(tokens, exchange.places, rows)
        return rows
    token, _, filled = _origins(exchange, len(tokens))
    if not len(tokens):
        return rows.zero_()
    return rows.copy_(torch.where(filled.unsqueeze(1), tokens[token], 0.0))


def summed_rows(rows: Tensor, exchange: Exchange) -> Tensor:
    """The sum ``[T, H]`` of each token's rows among ``rows[S, H]``, in float32 and in the order of ranks."""
    slots = exchange.slots
    if kernels := _kernels(rows):
        return kernels.add_up(rows, slots)
    total = torch.zeros(len(slots), rows.shape[1], dtype=compute_dtype(rows), device=rows.device)
    if len(rows):
        for slot in slots.unbind(1):
            total += torch.where(slot.unsqueeze(1) < 0, 0.0, rows[slot.clamp(min=0)])
    return total.to(rows.dtype)


def chosen_weights(row_weights: Tensor, exchange: Exchange) -> Tensor:
    """``[T, K]`` from ``row_weights[S, K]``: each choice's value stands in the row for that choice's rank."""
    local, size = exchange.ranks.local_experts, exchange.ranks.size
    owner = exchange.index.div(local, rounding_mode="floor")  # [T, K]
    slot = exchange.slots.gather(1, owner.clamp(0, size - 1))
    none = (slot < 0) | (owner < 0) | (owner >= size)
    if not len(row_weights):
        return row_weights.new_zeros(owner.shape)
    return row_weights.gather(0, slot.clamp(min=0)).masked_fill(none, 0.0)


def _origins(exchange: Exchange, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """The token and the rank of each row to send, and whether it is filled; 0 for padding."""
    places = exchange.places.clamp(min=0)
    length = max(tokens, 1)
    return places.remainder(length), places.div(length, rounding_mode="floor"), exchange.places >= 0


def _kernels(rows: Tensor) -> ModuleType | None:
    """The module with the Triton kernels, where they run."""
    if rows.device.type != "cuda":
        return None
    from veomni_triton_moe.token_dispatch import row_kernels

    return row_kernels
