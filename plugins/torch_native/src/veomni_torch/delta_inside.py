"""The inside of chunks of the gated delta rule: what needs no state, and the gradients of the inputs.

Shape suffixes: ``B`` batch, ``H`` value heads, ``N`` chunks, ``C`` tokens of a chunk, ``K`` key width, ``V`` value
width.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from veomni_core.ops.chunk_gated_delta_rule import NORM_EPS
from veomni_torch.delta_chunks import Chunks


@dataclass(frozen=True)
class Options:
    """What a call says besides its tensors; ``dtype`` is that of all arithmetic."""

    chunks: Chunks
    scale: float
    is_normed: bool
    keeps_final: bool
    dtype: torch.dtype


@dataclass(frozen=True)
class Inside:
    """What is known of some chunks without their states, each ``[B, H, N, ...]``.

    Attributes:
        raw: queries and keys as they came, ``[C, K]``, of the key heads.
        query, key, value, beta: queries and keys as they count, ``[C, K]``; values ``[C, V]``; ``[C]``.
        since_start, to_end: the decays from before the chunk to each token, and from it to the chunk's last, ``[C]``.
        pairwise: the decays between tokens ``[C, C]``, 0 above the diagonal.
        overlap: ``k[i] @ k[j] * pairwise`` below the diagonal ``[C, C]``.
        attention: ``q[i] @ k[j] * pairwise`` ``[C, C]``.
    """

    options: Options
    raw: tuple[Tensor, Tensor]
    query: Tensor
    key: Tensor
    value: Tensor
    beta: Tensor
    since_start: Tensor
    to_end: Tensor
    pairwise: Tensor
    overlap: Tensor
    attention: Tensor

    @classmethod
    def of(cls, inputs: tuple[Tensor, ...], group: slice, options: Options) -> Inside:
        """That of the chunks of ``group``; ``inputs`` are query, key, value, g and beta as the call has them."""
        q, k, v, g, beta = (options.chunks.read(x, group, options.dtype) for x in inputs)
        raw, repeats = (q, k), v.shape[1] // q.shape[1]
        if options.is_normed:
            q, k = (x * _inverse_norm(x) for x in raw)
        q, k = ((x.repeat_interleave(repeats, dim=1) if repeats > 1 else x) for x in (q * options.scale, k))
        # Each entry is a sum of its own log-decays. A difference of cumulated ones would lose the small decays that
        # come after a large one.
        between = g.unsqueeze(-1).expand(*g.shape, g.shape[-1]).tril(-1).cumsum(-2)
        to_end = between[..., -1, :].exp()
        pairwise = between.exp_().tril_()
        overlap = (k @ k.mT).mul_(pairwise).tril_(-1)
        attention = (q @ k.mT).mul_(pairwise)
        return cls(options, raw, q, k, v, beta, g.cumsum(-1).exp(), to_end, pairwise, overlap, attention)

    @cached_property
    def system(self) -> Tensor:
        """How much the correction of token ``j`` takes from that of ``i``, below the diagonal ``[C, C]``."""
        return self.overlap * self.beta.unsqueeze(-1)

    @cached_property
    def left(self) -> Tensor:
        """What a chunk leaves of the state before it ``[1, 1]``."""
        return self.since_start[..., -1:].unsqueeze(-1)

    @cached_property
    def reading(self) -> Tensor:
        """What is read of the state before the chunk, to be subtracted from :meth:`written` ``[C, K]``."""
        return self.key * (self.beta * self.since_start).unsqueeze(-1)

    @cached_property
    def writing(self) -> Tensor:
        """Where corrections go in the state after the chunk ``[C, K]``."""
        return self.key * self.to_end.unsqueeze(-1)

    @cached_property
    def decayed_query(self) -> Tensor:
        """What the outputs read of the state before the chunk ``[C, K]``."""
        return self.query * self.since_start.unsqueeze(-1)

    def written(self) -> Tensor:
        """A new tensor of the values, as much as ``beta`` says ``[C, V]``."""
        return self.value * self.beta.unsqueeze(-1)

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
        dsystem = (dright @ x.mT).neg_().tril_(-1)
        dattention = (dout @ x.mT).tril_()
        # A factor of an exponential gives it the product of its own gradient and itself.
        dbetween = (dattention * self.attention).add_(dsystem * self.system).tril_(-1)
        dbeta = (dsystem * self.overlap).sum(-1)
        doverlap = dsystem.mul_(self.pairwise).mul_(self.beta.unsqueeze(-1))
        dscores = dattention.mul_(self.pairwise)
        dk = (doverlap + doverlap.mT) @ self.key + dscores.mT @ self.query
        dq = dscores @ self.key

        dwriting = x @ dafter.mT
        dbetween[..., -1, :] += (dwriting * self.writing).sum(-1)
        dk.addcmul_(dwriting, self.to_end.unsqueeze(-1))
        ddecayed_query = dout @ before.mT
        dsince_start = (ddecayed_query * self.decayed_query).sum(-1)
        dq.addcmul_(ddecayed_query, self.since_start.unsqueeze(-1))
        dreading = (dright @ before.mT).neg_()
        dsince_start += (dreading * self.reading).sum(-1)
        dbeta += (dreading * self.key).sum(-1) * self.since_start
        dk.addcmul_(dreading, (self.beta * self.since_start).unsqueeze(-1))
        dsince_start[..., -1] += (before * dafter).sum((-2, -1)) * self.since_start[..., -1]

        dbeta += (dright * self.value).sum(-1)
        dv = dright * self.beta.unsqueeze(-1)
        dq, dk = (self._of_raw(*each) for each in ((self.raw[0], dq * self.options.scale), (self.raw[1], dk)))
        return dq, dk, dv, _of_log_decays(dsince_start, dbetween), dbeta

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


def _of_log_decays(dsince_start: Tensor, dbetween: Tensor) -> Tensor:
    """The gradient of ``g``: ``since_start[i]`` sums it for ``k <= i``, and ``between[i, j]`` for ``j < k <= i``."""
    dg = dsince_start.flip(-1).cumsum(-1).flip(-1)
    dg[..., 1:] += dbetween.cumsum(-1).tril_(-1).sum(-2)[..., :-1]
    return dg
