"""A few chunks of Mamba 2's scan, in operations that autograd can follow.

Shape suffixes: ``B`` batch, ``S`` sequence, ``H`` heads, ``P`` head width, ``G`` groups, ``R`` heads of a group, ``K``
chunks, ``L`` tokens of a chunk, ``N`` state width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

CHUNK = 64


def scanned(inputs: Sequence[Tensor], D: Tensor | None, state: Tensor, numbers: Tensor | None) -> tuple[Tensor, Tensor]:
    """The output ``[B, S, H, P]`` of some tokens, and the state after them.

    Args:
        inputs: ``x`` ``[B, S, H, P]``, the time steps and the logarithms of the decays ``[B, S, H]``, and ``B`` and
            ``C`` ``[B, S, G, N]``.
        D: ``[H]``.
        state: the one before these tokens ``[B, H, P, N]``.
        numbers: the packed sequence of the token before these, and of each of them ``[B, 1 + S]``; ``None`` where all
            are of one sequence.
    """
    x, steps, decays, B, C = inputs
    (batch, length, heads, width), groups = x.shape, B.shape[2]
    chunk = min(CHUNK, length)
    filling = -length % chunk
    entered = x * steps.unsqueeze(-1)
    x_BGKRLP = _cut(entered, filling, chunk).unflatten(3, (groups, -1)).permute(0, 3, 1, 4, 2, 5)
    g_BGKRL = _cut(decays, filling, chunk).unflatten(3, (groups, -1)).permute(0, 3, 1, 4, 2)
    B_BGKLN, C_BGKLN = (_cut(each, filling, chunk).permute(0, 3, 1, 2, 4) for each in (B, C))
    # Each entry is a sum of its own log-decays. A difference of cumulated ones would lose the small decays that come
    # after a large one.
    between = g_BGKRL.unsqueeze(-1).expand(*g_BGKRL.shape, chunk).tril(-1).cumsum(-2)
    pairwise = between.exp().tril()
    to_end, since_start = between[..., -1, :].exp(), g_BGKRL.cumsum(-1).exp()
    left = since_start[..., -1]
    if numbers is not None:
        before, inside = _numbers_of_chunks(numbers, filling, chunk)
        pairwise = pairwise * (inside.unsqueeze(-1) == inside.unsqueeze(-2))[:, None, :, None]
        to_end = to_end * (inside == inside[..., -1:])[:, None, :, None]
        since_start = since_start * (inside == before.unsqueeze(-1))[:, None, :, None]
        left = left * (inside[..., -1] == before)[:, None, :, None]
    written = (x_BGKRLP * to_end.unsqueeze(-1)).transpose(-1, -2).flatten(3, 4) @ B_BGKLN
    states, current = [], state.unflatten(1, (groups, -1))
    added = written.unflatten(3, (-1, width))
    for k in range(added.shape[2]):
        states.append(current)
        current = left[:, :, k, :, None, None] * current + added[:, :, k]
    before_BGKRPN = torch.stack(states, dim=2)
    scores = (C_BGKLN @ B_BGKLN.mT).unsqueeze(3) * pairwise
    read = (C_BGKLN @ before_BGKRPN.flatten(3, 4).mT).unflatten(-1, (-1, width))
    read = read.transpose(3, 4) * since_start.unsqueeze(-1)
    output = (scores @ x_BGKRLP + read).permute(0, 2, 4, 1, 3, 5).reshape(batch, length + filling, heads, width)
    output = output[:, :length]
    if D is not None:
        output = output + D.unsqueeze(-1) * x
    return output, current.flatten(1, 2)


def _cut(x: Tensor, filling: int, chunk: int) -> Tensor:
    """``[B, S, ...]`` as ``[B, K, L, ...]``, filled up with zeros: such tokens neither decay a state nor write."""
    if filling:
        x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, filling))
    return x.unflatten(1, (-1, chunk))


def _numbers_of_chunks(numbers: Tensor, filling: int, chunk: int) -> tuple[Tensor, Tensor]:
    """The sequence that each chunk comes after ``[B, K]``, and those of its tokens ``[B, K, L]``."""
    if filling:  # filled up with the last sequence's, so that the state after the last token is its own
        numbers = torch.cat([numbers, numbers[:, -1:].expand(-1, filling)], dim=1)
    return numbers[:, :-1:chunk], numbers[:, 1:].unflatten(1, (-1, chunk))
