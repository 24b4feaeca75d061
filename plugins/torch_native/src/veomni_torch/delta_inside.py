"""The inside of chunks of a delta rule: what needs no state, and the gradients of the inputs.

Shape suffixes: ``B`` batch, ``H`` value heads, ``N`` chunks, ``C`` tokens of a chunk, ``K`` key width, ``V`` value
width, ``D`` decays per token: 1, or K.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from veomni_ops.delta_recurrence import NORM_EPS
from veomni_torch.computed_once import ComputedOnce
from veomni_torch.delta_chunks import Chunks
from veomni_torch.delta_decays import ChannelDecays, Decays, TokenDecays, of_cumulated, of_sums_after


@dataclass(frozen=True)
class Options:
    """What a call says besides its tensors; ``dtype`` is that of all arithmetic."""

    chunks: Chunks
    scale: float
    per_channel: bool
    is_normed: bool
    keeps_final: bool
    dtype: torch.dtype


@dataclass(frozen=True)
class Inside:
    """What is known of some chunks without their states, each ``[B, H, N, ...]``.

    Attributes:
        raw: queries and keys as they came, ``[C, K]``, of the key heads.
        query, key, value, beta: queries and keys as they count, ``[C, K]``; values ``[C, V]``; ``[C, 1]``.
        decays: how states and scores decay.
        attention: how much queries see of keys, after decay, up to the diagonal ``[C, C]``.
        overlap: how much keys see of keys, below the diagonal ``[C, C]``.
    """

    options: Options
    raw: tuple[Tensor, Tensor]
    query: Tensor
    key: Tensor
    value: Tensor
    beta: Tensor
    decays: Decays
    attention: Tensor
    overlap: Tensor

    @classmethod
    def of(cls, inputs: tuple[Tensor, ...], group: slice, options: Options) -> Inside:
        """That of the chunks of ``group``; ``inputs`` are query, key, value, g and beta as the call has them."""
        q, k, v, g, beta = (options.chunks.read(x, group, options.dtype) for x in inputs)
        raw, repeats = (q, k), v.shape[1] // q.shape[1]
        if options.is_normed:
            q, k = (x * _inverse_norm(x) for x in raw)
        q, k = ((x.repeat_interleave(repeats, dim=1) if repeats > 1 else x) for x in (q * options.scale, k))
        decays: Decays = ChannelDecays(g) if options.per_channel else TokenDecays(g)
        return cls(options, raw, q, k, v, beta.unsqueeze(-1), decays, *decays.scores(q, k))

    @ComputedOnce
    def system(self) -> Tensor:
        """How much the correction of token ``j`` takes from that of ``i``, below the diagonal ``[C, C]``."""
        return self.overlap * self.beta

    @ComputedOnce
    def left(self) -> Tensor:
        """What a chunk leaves of the state before it ``[D, 1]``."""
        return self.decays.since_start[..., -1, :].unsqueeze(-1)

    @ComputedOnce
    def reading(self) -> Tensor:
        """What is read of the state before the chunk, to be subtracted from :meth:`written` ``[C, K]``."""
        return self.key * (self.beta * self.decays.since_start)

    @ComputedOnce
    def writing(self) -> Tensor:
        """Where corrections go in the state after the chunk ``[C, K]``."""
        return self.key * self.decays.to_end

    @ComputedOnce
    def decayed_query(self) -> Tensor:
        """What the outputs read of the state before the chunk ``[C, K]``."""
        return self.query * self.decays.since_start

    def written(self) -> Tensor:
        """A new tensor of the values, as much as ``beta`` says ``[C, V]``."""
        return self.value * self.beta

    def gradients(
        self, before: Tensor, x: Tensor, dout: Tensor, dright: Tensor, dafter: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The gradients of query, key, value, g and beta.

        Args:
            before: the states before the chunks ``[K, V]``.
            x: the corrections ``[C, V]``.
            dout: the gradients of the outputs ``[C, V]``.
            dright: the gradients of the right sides that the corrections solve ``[C, V]``.
            dafter: the gradients of the states after the chunks ``[K, V]``.
        """
        decays = self.decays
        dattention = (dout @ x.mT).tril_()
        doverlap = (dright @ x.mT).neg_().tril_(-1)  # so far of the system
        dbeta = (doverlap * self.overlap).sum(-1)
        dscores = (dattention, doverlap.mul_(self.beta))
        dq, dk, dg = decays.gradients(self.query, self.key, (self.attention, self.overlap), dscores)

        # A factor of an exponential gives it the product of its own gradient and itself.
        dwriting = x @ dafter.mT
        dto_end = decays.narrow(dwriting * self.writing)
        dk.addcmul_(dwriting, decays.to_end)
        ddecayed_query = dout @ before.mT
        dsince_start = ddecayed_query * self.decayed_query
        dq.addcmul_(ddecayed_query, decays.since_start)
        dreading = (dright @ before.mT).neg_()
        dsince_start = decays.narrow(dsince_start.addcmul_(dreading, self.reading))
        dsince_start[..., -1, :] += decays.narrow((before * dafter).sum(-1)) * decays.since_start[..., -1, :]
        dreading *= decays.since_start
        dbeta += (dreading * self.key).sum(-1)
        dk.addcmul_(dreading, self.beta)
        dg += of_cumulated(dsince_start) + of_sums_after(dto_end)

        dbeta += (dright * self.value).sum(-1)
        dv = dright * self.beta
        dq, dk = (self._of_raw(*each) for each in ((self.raw[0], dq * self.options.scale), (self.raw[1], dk)))
        return dq, dk, dv, dg if self.options.per_channel else dg.squeeze(-1), dbeta

    def _of_raw(self, raw: Tensor, gradient: Tensor) -> Tensor:
        """The gradient of a query or key as it came, of one as it counts, but for the scale."""
        repeats = gradient.shape[1] // raw.shape[1]
        if repeats > 1:
            gradient = gradient.unflatten(1, (raw.shape[1], repeats)).sum(2)
        if not self.options.is_normed:
            return gradient
        inverse = _inverse_norm(raw)
        return (gradient - raw * ((raw * gradient).sum(-1, keepdim=True) * inverse.square())) * inverse


def solve(system: Tensor, right: Tensor, transposed: bool = False) -> Tensor:
    """``X`` with ``(I + system) @ X = right``, or with ``system`` transposed."""
    matrix = system.mT if transposed else system
    return torch.linalg.solve_triangular(matrix, right, upper=transposed, unitriangular=True)


def _inverse_norm(x: Tensor) -> Tensor:
    return torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)
