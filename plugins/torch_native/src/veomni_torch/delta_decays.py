"""How states decay over the tokens of a chunk, and the scores of tokens by keys before them, which decay meanwhile.

Each decay is the exponential of a sum of its own log-decays. A difference of cumulated ones would lose the small decays
that come after a large one, and its exponential could overflow.

Shapes: ``C`` tokens of a chunk, a power of two, ``K`` key channels, ``D`` decays per token, 1 or K; before them the
same dimensions everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F


class Decays(Protocol):
    """The decays of chunks.

    Attributes:
        since_start, to_end: from before the chunk to each token, and from it to the chunk's last ``[C, D]``.
    """

    since_start: Tensor
    to_end: Tensor

    def narrow(self, x: Tensor) -> Tensor:
        """``x[C, K]`` as ``[C, D]``: the gradient of decays from that of each channel's."""

    def scores(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """``[C, C]`` twice: how much queries see of the keys before them and their own, and keys of those before them.

        Both are 0 elsewhere.
        """

    def gradients(
        self, query: Tensor, key: Tensor, scores: tuple[Tensor, Tensor], dscores: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of query, key ``[C, K]`` and the log-decays ``[C, D]``; overwrites ``dscores``."""


class TokenDecays:
    """One decay per token, of log-decays ``[C]``."""

    def __init__(self, g: Tensor) -> None:
        between = g.unsqueeze(-1).expand(*g.shape, g.shape[-1]).tril(-1).cumsum(-2)
        self.since_start = g.cumsum(-1).exp().unsqueeze(-1)
        self.to_end = between[..., -1, :].exp().unsqueeze(-1)
        self._between = between.exp_().tril_()  # [C, C]: from token j to token i, 0 above the diagonal

    def narrow(self, x: Tensor) -> Tensor:
        return x.sum(-1, keepdim=True)

    def scores(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        attention, overlap = ((rows @ key.mT).mul_(self._between) for rows in (query, key))
        return attention, overlap.tril_(-1)

    def gradients(
        self, query: Tensor, key: Tensor, scores: tuple[Tensor, Tensor], dscores: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        (attention, overlap), (dattention, doverlap) = scores, dscores
        # A factor of an exponential gives it the product of its own gradient and itself.
        dbetween = (dattention * attention).add_(doverlap * overlap).tril_(-1)
        dattention.mul_(self._between)
        doverlap.mul_(self._between)
        dk = (doverlap + doverlap.mT) @ key + dattention.mT @ query
        dg = torch.zeros_like(self.since_start)
        dg[..., 1:, 0] = dbetween.cumsum(-1).tril_(-1).sum(-2)[..., :-1]  # between[i, j] sums it for j < k <= i
        return dattention @ key, dk, dg


class ChannelDecays:
    """One decay per token and key channel, of log-decays ``[C, K]``.

    Of all pairs of tokens, those of a block's second half with its first half have a decay that is the product of two:
    from the earlier token to the middle, and from the middle to the later one. Their scores are one matrix product. The
    pairs inside the halves are those of smaller blocks, down to single tokens.
    """

    def __init__(self, g: Tensor) -> None:
        self.since_start, self.to_end = g.cumsum(-2).exp(), _sums_after(g).exp()
        self._g = g

    def narrow(self, x: Tensor) -> Tensor:
        return x

    def scores(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        attention = torch.diag_embed((query * key).sum(-1))
        overlap = torch.zeros_like(attention)
        for size, to_middle, from_middle in self._halves_of_blocks():
            (first, second), (_, queries) = _halves(key, size), _halves(query, size)
            before = (first * to_middle).mT
            _pairs(attention, size).copy_((queries * from_middle) @ before)
            _pairs(overlap, size).copy_((second * from_middle) @ before)
        return attention, overlap

    def gradients(
        self, query: Tensor, key: Tensor, scores: tuple[Tensor, Tensor], dscores: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        own = dscores[0].diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
        dq, dk, dg = own * key, own * query, torch.zeros_like(self._g)
        for size, to_middle, from_middle in self._halves_of_blocks():
            (first, second), (_, queries) = _halves(key, size), _halves(query, size)
            dattention, doverlap = (_pairs(each, size) for each in dscores)
            before = first * to_middle
            dqueries = (dattention @ before).mul_(from_middle)
            dsecond = (doverlap @ before).mul_(from_middle)
            dfirst = dattention.mT @ (queries * from_middle) + doverlap.mT @ (second * from_middle)
            dfirst.mul_(to_middle)
            _halves(dq, size)[1].add_(dqueries)
            _halves(dk, size)[0].add_(dfirst)
            _halves(dk, size)[1].add_(dsecond)
            dg_first, dg_second = _halves(dg, size)
            dg_first.add_(of_sums_after(dfirst.mul_(first)))
            dg_second.add_(of_cumulated(dqueries.mul_(queries).addcmul_(dsecond, second)))
        return dq, dk, dg

    def _halves_of_blocks(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """The length of a half, and the decays to the middle and from it, of blocks of each length."""
        size = self._g.shape[-2] // 2
        while size:
            first, second = _halves(self._g, size)
            yield size, _sums_after(first).exp_(), second.cumsum(-2).exp_()
            size //= 2


def of_cumulated(gradient: Tensor) -> Tensor:
    """The gradient of ``x[C, D]``, from that of its sums up to each row."""
    return gradient.flip(-2).cumsum(-2).flip(-2)


def of_sums_after(gradient: Tensor) -> Tensor:
    """The gradient of ``x[C, D]``, from that of its sums after each row."""
    return F.pad(gradient[..., :-1, :].cumsum(-2), (0, 0, 1, 0))


def _sums_after(x: Tensor) -> Tensor:
    return F.pad(of_cumulated(x[..., 1:, :]), (0, 0, 0, 1))


def _halves(x: Tensor, size: int) -> tuple[Tensor, ...]:
    """The first and second halves of blocks of ``x[C, K]``, views ``[C / 2 / size, size, K]``."""
    return x.unflatten(-2, (-1, 2, size)).unbind(-3)


def _pairs(scores: Tensor, size: int) -> Tensor:
    """A view of ``scores[C, C]``: of each block, its second half by its first ``[C / 2 / size, size, size]``."""
    blocks = scores.unflatten(-1, (-1, 2, size)).unflatten(-4, (-1, 2, size))
    return blocks[..., 1, :, :, 0, :].diagonal(dim1=-4, dim2=-2).movedim(-1, -3)
