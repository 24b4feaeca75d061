"""The loss and its gradients, put together chunk by chunk. Knows no library: the four calls are handed in.

Per chunk of tokens: the logits, QuACK's kernel that replaces them by their gradient and gives the losses, the rows of
the gradient of ``hidden``, and what the chunk adds to the gradient of ``weight``. The last chunk adds its part in
backward, where one product can also scale the sum and round it, as QuACK's own function does, and no pass of its own
goes over the float32 sum.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from veomni_core.ops.memory_layout import aligned

# Memory of one chunk's logits. At V = 151936 this is 2048 tokens: the products are then as fast as with more, and
# adding to the float32 gradient of the weight, 8 bytes per entry and chunk, happens T / 2048 times.
_CHUNK_BYTES = 640 * 2**20
_CHUNK_UNIT = 256  # tokens: two rows of tiles, which the products' clusters take together
_ALIGNMENT = 8  # 16-bit values in the 16 bytes that a row must be a multiple of


class QuackCalls(Protocol):
    """What a chunk takes of QuACK: :mod:`veomni_quack.cross_entropy_loss.quack_calls`, on a GPU."""

    def losses(self, logits: Tensor, labels: Tensor, out: Tensor, ignore_index: int) -> None:
        """``out[T]``: the float32 cross entropy of each row of ``logits[T, V]``, 0 where its label is ignored."""

    def losses_and_gradient(self, logits: Tensor, labels: Tensor, out: Tensor, ignore_index: int) -> None:
        """:meth:`losses`, and ``logits`` replaced by the gradient of their sum."""

    def add_product(self, dlogits: Tensor, hidden: Tensor, out: Tensor, first: bool) -> None:
        """``out[V, H] += dlogits[T, V].T @ hidden[T, H]`` in float32; the first time ``out`` is overwritten."""

    def scaled_sum(self, dlogits: Tensor, hidden: Tensor, so_far: Tensor | None, factor: Tensor, out: Tensor) -> None:
        """``out[V, H] = factor * (so_far[V, H] + dlogits[T, V].T @ hidden[T, H])``, added in float32, rounded once."""


def loss_and_gradients(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    softcap: float | None,
    scale: float | None,
    wants_hidden: bool,
    wants_weights: bool,
    calls: QuackCalls,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The sum of the losses; its gradients by ``hidden[T, H]``, by ``weight`` so far, and by ``bias[V]``.

    The last result is the gradient by the last chunk's logits ``[rows, V]``, whose part of the weight's gradient is
    left to :func:`weight_gradient`; both have columns that only align them. Gradients of ``weight`` and ``bias`` are
    float32. What is not wanted is empty, and so is the weight's where there is one chunk.
    """
    tokens, width = hidden.shape
    vocabulary = len(weight)
    losses = hidden.new_empty(tokens, dtype=torch.float32)
    dhidden = hidden.new_empty(hidden.shape if wants_hidden else 0)
    dweight = _float32(hidden, sum_shape(tokens, width, vocabulary) if wants_weights else (0, 0))
    dbias = _float32(hidden, (vocabulary if wants_weights and bias is not None else 0,)).zero_()
    rows = chunk_tokens(tokens, vocabulary)
    buffer = hidden.new_empty(rows, round_up(vocabulary))
    for start in range(0, tokens, rows):
        part, wanted, given = (tensor[start : start + rows] for tensor in (hidden, labels, losses))
        padded = buffer[: len(part)]
        padded[:, vocabulary:] = -torch.inf  # no probability for the columns that only align the rows
        logits = padded[:, :vocabulary]
        slope = _logits(part, weight, bias, softcap, scale, out=logits)
        if not (wants_hidden or wants_weights):
            calls.losses(padded, wanted, given, ignore_index)
            continue
        calls.losses_and_gradient(padded, wanted, given, ignore_index)
        _through_bounds(logits, slope, scale)
        if wants_hidden:
            torch.mm(logits, weight, out=dhidden[start : start + rows])
        if wants_weights and start + rows < tokens:
            calls.add_product(logits, _aligned(part), dweight, first=start == 0)
        if dbias.numel():
            dbias += logits.sum(0, dtype=torch.float32)
    kept = buffer[: last_rows(tokens, rows)] if wants_weights else buffer.new_empty(0, buffer.shape[1])
    return losses.sum(), dhidden, dweight, dbias, kept


def weight_gradient(
    hidden: Tensor, vocabulary: int, so_far: Tensor, last_dlogits: Tensor, factor: Tensor, calls: QuackCalls
) -> Tensor:
    """What :func:`loss_and_gradients` left of the gradient of ``weight[V, H]``, times ``factor``, in hidden's dtype."""
    tokens, width = hidden.shape
    if not tokens:
        return hidden.new_zeros(vocabulary, width)
    gradient = hidden.new_empty(vocabulary, round_up(width))
    last = _aligned(hidden[tokens - len(last_dlogits) :])
    calls.scaled_sum(last_dlogits[:, :vocabulary], last, so_far if so_far.numel() else None, factor, gradient)
    return gradient[:, :width].contiguous()


def sum_shape(tokens: int, width: int, vocabulary: int) -> tuple[int, int]:
    """Of the weight's gradient by all chunks but the last."""
    return (vocabulary, round_up(width)) if tokens > chunk_tokens(tokens, vocabulary) else (0, 0)


def last_rows(tokens: int, rows: int) -> int:
    """How many tokens the last chunk has, where each of the others has ``rows``."""
    return tokens - (tokens - 1) // rows * rows if tokens else 0


def chunk_tokens(tokens: int, vocabulary: int) -> int:
    """How many tokens make a chunk; at least one."""
    most = _CHUNK_BYTES // (2 * vocabulary) // _CHUNK_UNIT * _CHUNK_UNIT
    return max(min(tokens, max(most, _CHUNK_UNIT)), 1)


def _logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, softcap: float | None, scale: float | None, out: Tensor
) -> Tensor | None:
    """The bounded logits of a chunk in ``out``; ``tanh`` of what is bounded, where there is a ``softcap``."""
    if bias is None:
        torch.mm(hidden, weight.T, out=out)
    else:
        torch.addmm(bias, hidden, weight.T, out=out)
    if scale is not None:
        out.mul_(scale)
    if softcap is None:
        return None
    bounded = torch.tanh(out / softcap)
    torch.mul(bounded, softcap, out=out)
    return bounded


def _through_bounds(gradient: Tensor, tanh: Tensor | None, scale: float | None) -> None:
    """Turn the gradient by bounded logits into that by the product's, in place."""
    if tanh is not None:
        torch.ops.aten.tanh_backward.grad_input(gradient, tanh, grad_input=gradient)
    if scale is not None:
        gradient.mul_(scale)


def _float32(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=like.device)


def _aligned(rows: Tensor) -> Tensor:
    """``rows``, with zeros up to whole 16 bytes; a copy where there are any, or where they lie elsewhere."""
    missing = -rows.shape[1] % _ALIGNMENT
    return F.pad(rows, (0, missing)) if missing else aligned(rows)


def round_up(size: int) -> int:
    """To whole 16 bytes of 16-bit values."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT
