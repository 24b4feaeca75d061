"""The samples of token_dispatch: what each rank has, with small experts of the contract's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from veomni_ops.contract import Draw, Sample, compute_dtype, leaf
from veomni_ops.expert_ranks import ExpertRanks
from veomni_ops.rank_contract import RankSample

_WIDTH = 24  # H of most samples
_LOCAL = 2  # experts per rank


def linear_experts(matrices: Tensor, rows: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum of the products of rows with the chosen matrices, in float32: the experts of the samples.

    Args:
        matrices: ``[L, H, H]``, one of each expert.
        rows: ``[R, H]``.
        index: ``[R, K]``; an index outside of ``[0, L)`` is dropped.
        weights: ``[R, K]``.

    Returns:
        ``[R, H]`` in the rows' dtype.

    Example:
        >>> matrices = torch.eye(2) * torch.tensor([1.0, 10.0]).view(2, 1, 1)
        >>> linear_experts(matrices, torch.ones(1, 2), torch.tensor([[0, 1, 2]]), torch.tensor([[0.5, 0.5, 0.5]]))
        tensor([[5.5000, 5.5000]])
    """
    wide = compute_dtype(rows)
    total = torch.zeros_like(rows, dtype=wide)
    for expert, matrix in enumerate(matrices):
        share = torch.where(index == expert, weights, 0.0).to(wide).sum(dim=1, keepdim=True)  # [R, 1]
        total = total + share * (rows @ matrix).to(wide)
    return total.to(rows.dtype)


def call(kernel: Callable[..., Any], sample: Sample, group: Any) -> Tensor:
    """``kernel`` on what one rank has.

    Args:
        kernel: a kernel of token_dispatch.
        sample: its args are ``hidden``, ``top_k_index``, ``top_k_weights`` and the matrices of this rank's experts.
        group: the process group of the ranks.

    Example:
        >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        >>> sample = next(rank_samples(torch.device("cpu"), torch.float32)).calls[0]
        >>> def kernel(hidden, index, weights, experts, ranks):
        ...     return experts(hidden, index, weights)  # of one rank, all experts are here
        >>> call(kernel, sample, torch.distributed.group.WORLD).shape
        torch.Size([5, 24])
    """
    *tokens, matrices = sample.args
    ranks = ExpertRanks(group, group.size(), group.rank(), len(matrices))
    return kernel(*tokens, partial(linear_experts, matrices), ranks)


def whole(samples: Sequence[Sample]) -> list[Tensor]:
    """What each rank gets, by all experts on each rank's tokens.

    Args:
        samples: what each rank has.

    Example:
        >>> sample = next(rank_samples(torch.device("cpu"), torch.float32))
        >>> [tuple(result.shape) for result in whole(sample.calls)]
        [(5, 24), (7, 24), (3, 24), (6, 24)]
    """
    matrices = torch.cat([sample.args[3] for sample in samples])
    return [linear_experts(matrices, *sample.args[:3]) for sample in samples]


def rank_samples(device: torch.device, dtype: torch.dtype) -> Iterator[RankSample]:
    """Uneven, empty and one-sided counts; choices that repeat; partial sums that cancel; strides and mixed dtypes.

    Args:
        device: where the tensors are.
        dtype: of the tokens and the experts.

    Example:
        >>> [sample.name for sample in rank_samples(torch.device("cpu"), torch.float32) if sample.ranks == 3]
        ['a rank without tokens', 'a rank that gets no row', 'a row of one number']
    """
    draw = Draw(device, dtype)

    def sample(name: str, *index: Tensor, weights: torch.dtype = dtype) -> RankSample:
        return RankSample(name, tuple(_of_a_rank(draw, choices, weights) for choices in index))

    def distinct(tokens: int, k: int, ranks: int) -> Tensor:
        return draw.normal(tokens, ranks * _LOCAL).float().argsort(dim=-1)[:, :k]

    yield sample("odd counts", *(distinct(tokens, 3, 4) for tokens in (5, 7, 3, 6)))
    yield sample("a rank without tokens", *(distinct(tokens, 2, 3) for tokens in (4, 0, 3)))
    yield sample("a rank that gets no row", *(distinct(tokens, 1, 1) + 2 * _LOCAL for tokens in (4, 5, 3)))
    yield sample("all tokens to one rank", *(distinct(tokens, 2, 1) + _LOCAL for tokens in (6, 1)))
    yield sample("no tokens on any rank", *(distinct(0, 2, 2) for _ in range(2)))
    yield sample("an expert twice in a row", *(draw.integers(2 * _LOCAL, tokens, 4) for tokens in (5, 4)))
    yield sample("one rank", distinct(5, 2, 1))
    yield sample("routing weights in float32", *(distinct(4, 2, 2) for _ in range(2)), weights=torch.float32)
    # Widths, choices and tokens past what a tile has: 130 experts, of which the last are not chosen.
    many = tuple(_of_a_rank(draw, draw.integers(110, tokens, 9), dtype, 128, 65) for tokens in (65, 129))
    yield RankSample("65 tokens of nine choices", many)
    few = (_of_a_rank(draw, draw.integers(3 * _LOCAL, tokens, 2), dtype, 1) for tokens in (2, 1, 3))
    yield RankSample("a row of one number", tuple(map(_signed, few)))
    yield RankSample("hidden states with a stride", tuple(_strided(draw, distinct(4, 2, 2)) for _ in range(2)))
    yield RankSample("partial sums that cancel", tuple(_cancelling(draw) for _ in range(4)))
    # More experts than a byte counts.
    yield RankSample(
        "300 experts", tuple(_of_a_rank(draw, draw.integers(300, tokens, 4), dtype, 8, 150) for tokens in (65, 40))
    )


def _of_a_rank(
    draw: Draw, index: Tensor, weights: torch.dtype, width: int = _WIDTH, local_experts: int = _LOCAL
) -> Sample:
    routing = draw.normal(*index.shape).abs().to(weights)
    matrices = draw.normal(local_experts, width, width, scale=width**-0.5)
    return Sample("", (leaf(draw.normal(len(index), width)), index, leaf(routing), leaf(matrices)))


def _signed(sample: Sample) -> Sample:
    """With routing weights below zero, and of zero."""
    hidden, index, routing, matrices = sample.args
    signed = routing.detach() * torch.tensor([-1.0, 0.0], device=routing.device, dtype=routing.dtype)
    return Sample("", (hidden, index, leaf(signed), matrices))


def _strided(draw: Draw, index: Tensor) -> Sample:
    _, *others = _of_a_rank(draw, index, draw.dtype).args
    return Sample("", (leaf(draw.normal(len(index), 2 * _WIDTH)[:, ::2]), *others))


def _cancelling(draw: Draw) -> Sample:
    """Experts of ranks 0, 1 and 2 give ``512 x``, ``x`` and ``-512 x``: a running sum of 16 bits loses the ``x``."""
    # Of few bits, so that these sums are exact in float32.
    hidden = draw.normal(3, _WIDTH).bfloat16().to(draw.dtype)
    matrices = torch.eye(_WIDTH, dtype=draw.dtype, device=draw.device)
    index = torch.arange(3, device=draw.device).mul(_LOCAL).repeat(3, 1)
    weights = torch.tensor([512.0, 1.0, -512.0], dtype=draw.dtype, device=draw.device).repeat(3, 1)
    return Sample("", (leaf(hidden), index, weights, matrices.repeat(_LOCAL, 1, 1)))
