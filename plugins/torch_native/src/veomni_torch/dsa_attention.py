"""dsa_attention in plain PyTorch: a block of queries at a time, and again in backward.

Memory beyond inputs, outputs and their gradients is that of one block: its gathered keys and its logits, in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from veomni_core.kernels import first_derivatives_only, product_operands, without_autocast
from veomni_ops.contract import compute_dtype
from veomni_ops.dsa_attention import check_call
from veomni_ops.visible_keys import as_mask

_CPU_BLOCK, _ACCELERATOR_BLOCK = 1 << 20, 1 << 26  # numbers in the tensors of a block


def made(indexer_loss: float = 0.0, indexer_stage: str = "sparse") -> Any:
    """The kernel. The binding reads how much of the indexer's loss counts, and its stage, and passes inputs so."""
    return standard


def standard(
    query: Tensor,
    keys: Tensor,
    indices: Tensor | None,
    scaling: float,
    value_width: int,
    index_query: Tensor | None = None,
    index_key: Tensor | None = None,
    index_weights: Tensor | None = None,
    visible: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """``[B, T, H, V]``, and with the indexer's inputs its loss of each query ``[B, T]``.

    Autograd keeps the inputs.

    Raises:
        ValueError: shapes or dtypes don't fit together.
        TypeError: query and keys differ in dtype without autocast.
    """
    query, keys = product_operands("torch", query=query, keys=keys)
    check_call(query, keys, indices, value_width, index_query, index_key, index_weights, visible)
    options = scaling, value_width, compute_dtype(query)
    output, loss = _Attention.apply(query, keys, index_query, index_key, index_weights, indices, visible, options)
    return output if loss is None else (output, loss)


@dataclass(frozen=True)
class _Block:
    """Some queries: their inputs, of which those that are keys are gathered, all in the dtype of arithmetic."""

    query: Tensor
    chosen: Tensor
    index_query: Tensor | None
    index_chosen: Tensor | None
    index_weights: Tensor | None

    def computed(self, is_key: Tensor, scaling: float, value_width: int) -> tuple[Tensor, Tensor | None]:
        logits = (self.query @ self.chosen.transpose(2, 3)) * scaling
        probabilities = _softmax(logits, is_key.unsqueeze(2))
        output = probabilities @ self.chosen[..., :value_width]
        if self.index_query is None or self.index_chosen is None or self.index_weights is None:
            return output, None
        products = (self.index_query @ self.index_chosen.transpose(2, 3)).relu()
        scores = (self.index_weights.unsqueeze(2) @ products).squeeze(2)
        target = probabilities.detach().mean(2)
        hidden = ~is_key & is_key.any(-1, keepdim=True)
        found = scores.masked_fill(hidden, -torch.inf).log_softmax(-1).masked_fill(~is_key, 0.0)
        return output, (torch.xlogy(target, target) - target * found).sum(-1)


def _softmax(logits: Tensor, is_key: Tensor) -> Tensor:
    hidden = ~is_key & is_key.any(-1, keepdim=True)  # nothing for a query without a key, for which all would be NaN
    return logits.masked_fill(hidden, -torch.inf).softmax(-1).masked_fill(~is_key, 0.0)


class _Attention(Function):
    @staticmethod
    @without_autocast
    def forward(
        ctx: Any,
        query: Tensor,
        keys: Tensor,
        index_query: Tensor | None,
        index_key: Tensor | None,
        index_weights: Tensor | None,
        indices: Tensor | None,
        visible: Tensor | None,
        options: tuple[float, int, torch.dtype],
    ) -> tuple[Tensor, Tensor | None]:
        scaling, value_width, wide = options
        inputs = (query, keys, index_query, index_key, index_weights)
        output = torch.empty(*query.shape[:3], value_width, dtype=query.dtype, device=query.device)
        loss = None if index_query is None else torch.empty(query.shape[:2], dtype=wide, device=query.device)
        for rows in _blocks(query, keys, indices, index_query):
            block = _Block(*_of_block(inputs, rows, indices, wide))  # type: ignore[arg-type]
            output[:, rows], losses = block.computed(_are_keys(rows, keys, indices, visible), scaling, value_width)
            if loss is not None and losses is not None:
                loss[:, rows] = losses
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs, indices, visible)
        ctx.options = options
        return output, loss

    @staticmethod
    @first_derivatives_only
    @without_autocast
    def backward(ctx: Any, doutput: Tensor | None, dloss: Tensor | None = None) -> tuple[Any, ...]:
        *inputs, indices, visible = ctx.saved_tensors
        scaling, value_width, wide = ctx.options
        needed = [
            wanted and (doutput if place < 2 else dloss) is not None
            for place, wanted in enumerate(ctx.needs_input_grad[:5])
        ]
        gradients = [
            torch.zeros(each.shape, dtype=wide if _OF_KEYS[place] else each.dtype, device=each.device)
            if needed[place]
            else None
            for place, each in enumerate(inputs)
        ]
        for rows in _blocks(inputs[0], inputs[1], indices, inputs[2]) if any(needed) else ():
            leaves = [
                None if each is None else each.detach().requires_grad_(wanted)
                for each, wanted in zip(_of_block(inputs, rows, indices, wide), needed, strict=True)
            ]
            is_key = _are_keys(rows, inputs[1], indices, visible)
            with torch.enable_grad():
                results = _Block(*leaves).computed(is_key, scaling, value_width)  # type: ignore[arg-type]
            given = [None if each is None else each[:, rows].to(wide) for each in (doutput, dloss)]
            pairs = [(a, b) for a, b in zip(results, given, strict=True) if a is not None and b is not None]
            pairs = [pair for pair in pairs if pair[0].requires_grad]
            sought = [each for each in leaves if each is not None and each.requires_grad]
            found = iter(torch.autograd.grad([a for a, _ in pairs], sought, [b for _, b in pairs]))
            for into, of_keys in zip(gradients, _OF_KEYS, strict=True):
                if into is not None and of_keys:
                    _scatter(into, next(found), None if indices is None else indices[:, rows])
                elif into is not None:
                    into[:, rows] = next(found)
        cast = (each if each is None else each.to(x.dtype) for x, each in zip(inputs, gradients, strict=True))
        return *cast, None, None, None


_OF_KEYS = (False, True, False, True, False)  # which inputs have a row for each key, not for each query


def _blocks(query: Tensor, keys: Tensor, indices: Tensor | None, index_query: Tensor | None) -> Iterator[slice]:
    """The queries that are computed together, as many as keep a block's tensors small."""
    batch, length, heads, width = query.shape
    of_index = 0 if index_query is None else index_query.shape[2] + index_query.shape[3]
    numbers = batch * (keys.shape[1] if indices is None else indices.shape[2]) * (width + 2 * heads + of_index)
    size = max(1, (_CPU_BLOCK if query.device.type == "cpu" else _ACCELERATOR_BLOCK) // max(1, numbers))
    for first in range(0, length, size):
        yield slice(first, min(first + size, length))


def _are_keys(rows: slice, keys: Tensor, indices: Tensor | None, visible: Any) -> Tensor:
    """Which of the block's keys its queries attend to ``[B, T, K]``."""
    return as_mask(visible[:, rows], keys.shape[1]) if indices is None else indices[:, rows] >= 0


def _of_block(inputs: Any, rows: slice, indices: Tensor | None, wide: torch.dtype) -> Iterator[Tensor | None]:
    """Of each input the rows of the block: of queries a slice, of keys what they have chosen, or one copy of all."""
    for each, of_keys in zip(inputs, _OF_KEYS, strict=True):
        if each is None:
            yield None
        elif of_keys:
            yield (each.unsqueeze(1) if indices is None else _gathered(each, indices[:, rows])).to(wide)
        else:
            yield each[:, rows].to(wide)


def _gathered(keys: Tensor, indices: Tensor) -> Tensor:
    rows = torch.arange(keys.shape[0], device=keys.device).view(-1, 1, 1)
    return keys[rows, indices.clamp_min(0)].masked_fill((indices < 0).unsqueeze(-1), 0.0)


def _scatter(into: Tensor, gradient: Tensor, indices: Tensor | None) -> None:
    """Add to each key the gradients that it got where it was chosen. At -1 they are 0, or the NaN of another."""
    if indices is None:
        into += gradient.squeeze(1)
        return
    gradient = gradient.masked_fill((indices < 0).unsqueeze(-1), 0.0)
    places = indices.clamp_min(0) + torch.arange(len(indices), device=indices.device).view(-1, 1, 1) * into.shape[1]
    into.view(-1, into.shape[-1]).index_add_(0, places.flatten(), gradient.flatten(0, 2))
