"""The loss and its gradients, computed chunk by chunk. Imports no kernel library: the three calls are passed in.

For each chunk of tokens: compute the logits; QuACK's kernel returns the losses and overwrites the logits with their
gradient; write the chunk's rows of ``dhidden``; add the chunk's product to ``dweight``.

The last chunk's product is added in backward instead. There one GEMM adds it, scales the sum by the incoming gradient
and rounds it, as in QuACK's own function; otherwise a separate pass over the float32 sum would be needed.

Shapes: T tokens, H hidden size, V vocabulary, rows = tokens of one chunk.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from veomni_core.kernels import aligned

# Memory of one chunk's logits. At V = 151936 this is 2048 tokens: the GEMMs are as fast as with larger chunks, and
# the float32 dweight is read and written (8 bytes per entry) only T / 2048 times.
_CHUNK_BYTES = 640 * 2**20
_CHUNK_UNIT = 256  # tokens: two rows of tiles, which one thread-block cluster of the GEMMs computes together
_ALIGNMENT = 8  # rows must be a multiple of 16 bytes: 8 values of 16 bits


class QuackCalls(Protocol):
    """The three library calls per chunk; on a GPU :mod:`veomni_quack.cross_entropy_loss.quack_calls`."""

    def losses_and_gradient(self, logits: Tensor, labels: Tensor, out: Tensor, ignore_index: int) -> None:
        """``out[rows]``: the float32 cross entropy of each row of ``logits[rows, V]``; 0 for ignored labels.

        Overwrites ``logits`` with the gradient of the losses' sum.
        """

    def add_product(self, dlogits: Tensor, hidden: Tensor, out: Tensor, first: bool) -> None:
        """``out[V, H] += dlogits[rows, V].T @ hidden[rows, H]`` in float32; if ``first``, ``=`` instead of ``+=``."""

    def scaled_sum(self, dlogits: Tensor, hidden: Tensor, so_far: Tensor | None, factor: Tensor, out: Tensor) -> None:
        """``out[V, H] = factor * (so_far[V, H] + dlogits[rows, V].T @ hidden[rows, H])``, in float32, rounded once."""


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
    """The sum of the losses, and its gradients.

    Args:
        hidden: ``[T, H]``.
        weight: ``[V, H]``.
        labels: ``[T]``.
        bias: ``[V]``.
        calls: The library's kernels.

    Returns:
        The sum of the losses; ``dhidden[T, H]``; ``dweight[V, H]`` of all chunks but the last, float32; ``dbias[V]``,
        float32; and the last chunk's dlogits ``[rows, V]``, whose product :func:`weight_gradient` adds in backward.
        ``dweight`` and dlogits are padded with columns to multiples of 16 bytes. Gradients that were not requested are
        empty, and so is ``dweight`` if there is a single chunk.
    """
    tokens, width = hidden.shape
    vocabulary = len(weight)
    losses = hidden.new_empty(tokens, dtype=torch.float32)
    dhidden = hidden.new_empty(hidden.shape if wants_hidden else 0)
    dweight = _float32(hidden, sum_shape(tokens, width, vocabulary) if wants_weights else (0, 0))
    dbias = _float32(hidden, (vocabulary if wants_weights and bias is not None else 0,)).zero_()
    rows = chunk_tokens(tokens, vocabulary)
    buffer = hidden.new_empty(rows, round_up(vocabulary))  # all chunks' logits share this memory
    for start in range(0, tokens, rows):
        part, wanted, given = (tensor[start : start + rows] for tensor in (hidden, labels, losses))
        padded = buffer[: len(part)]
        padded[:, vocabulary:] = -torch.inf  # the padding columns get probability 0
        logits = padded[:, :vocabulary]  # [rows, V]
        slope = _logits(part, weight, bias, softcap, scale, out=logits)
        calls.losses_and_gradient(padded, wanted, given, ignore_index)  # from here on `logits` holds dlogits
        if not (wants_hidden or wants_weights):
            continue
        _through_bounds(logits, slope, scale)
        if wants_hidden:
            torch.mm(logits, weight, out=dhidden[start : start + rows])
        if wants_weights and start + rows < tokens:
            calls.add_product(logits, _aligned(part), dweight, first=start == 0)
        if dbias.numel():
            dbias += logits.sum(0, dtype=torch.float32)
    # The buffer still holds the last chunk's dlogits.
    kept = buffer[: last_rows(tokens, rows)] if wants_weights else buffer.new_empty(0, buffer.shape[1])
    return losses.sum(), dhidden, dweight, dbias, kept


def weight_gradient(
    hidden: Tensor, vocabulary: int, so_far: Tensor, last_dlogits: Tensor, factor: Tensor, calls: QuackCalls
) -> Tensor:
    """Completes the gradient of ``weight``: adds the last chunk and multiplies by ``factor``.

    Args:
        hidden: ``[T, H]``.
        so_far: The float32 sum of all other chunks, or empty if there is one chunk.
        last_dlogits: ``[rows, V]``, padded.
        factor: The incoming gradient of the loss, a scalar on the device.

    Returns:
        ``[V, H]`` in hidden's dtype.
    """
    tokens, width = hidden.shape
    if not tokens:
        return hidden.new_zeros(vocabulary, width)
    gradient = hidden.new_empty(vocabulary, round_up(width))
    last = _aligned(hidden[tokens - len(last_dlogits) :])
    calls.scaled_sum(last_dlogits[:, :vocabulary], last, so_far if so_far.numel() else None, factor, gradient)
    return gradient[:, :width].contiguous()


def sum_shape(tokens: int, width: int, vocabulary: int) -> tuple[int, int]:
    """The shape of ``dweight`` summed over all chunks but the last; empty if there is one chunk."""
    return (vocabulary, round_up(width)) if tokens > chunk_tokens(tokens, vocabulary) else (0, 0)


def last_rows(tokens: int, rows: int) -> int:
    """The number of tokens in the last chunk; every other chunk has ``rows``."""
    return tokens - (tokens - 1) // rows * rows if tokens else 0


def chunk_tokens(tokens: int, vocabulary: int) -> int:
    """The number of tokens per chunk; at least one."""
    most = _CHUNK_BYTES // (2 * vocabulary) // _CHUNK_UNIT * _CHUNK_UNIT
    return max(min(tokens, max(most, _CHUNK_UNIT)), 1)


def _logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, softcap: float | None, scale: float | None, out: Tensor
) -> Tensor | None:
    """Write a chunk's logits, after scale and softcap, to ``out[rows, V]``.

    Returns:
        ``tanh(scale * logits / softcap)``, which the derivative of the softcap needs; ``None`` without a softcap.
    """
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
    """Chain rule through softcap and scale: turn dlogits into the gradient of ``hidden @ weight.T``, in place."""
    if tanh is not None:
        torch.ops.aten.tanh_backward.grad_input(gradient, tanh, grad_input=gradient)
    if scale is not None:
        gradient.mul_(scale)


def _float32(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=like.device)


def _aligned(rows: Tensor) -> Tensor:
    """``rows``, padded with zeros to a multiple of 16 bytes. Copies only to pad, or if ``rows`` is not aligned."""
    missing = -rows.shape[1] % _ALIGNMENT
    return F.pad(rows, (0, missing)) if missing else aligned(rows)


def round_up(size: int) -> int:
    """``size`` rounded up to a multiple of 16 bytes, in values of 16 bits."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT
