"""The all-to-all of Ulysses: from a part of the sequence with all heads to the whole sequence with a part of the heads.

Every function works on any process group whose backend has an all-to-all (NCCL, gloo, HCCL), and traces without a
graph break under ``torch.compile``. Rank r of n holds positions ``[r * s, (r + 1) * s)`` of a sequence of ``n * s``,
and after the exchange heads ``[r * h, (r + 1) * h)`` of ``n * h``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed import _functional_collectives as collectives
from torch.distributed import group as groups

from veomni_core.errors import HostError
from veomni_core.kernels import first_derivatives_only
from veomni_transformers.sequence.copies import contiguous, copy, merged

Tensors = tuple[Tensor, ...]


def ranks_of(group: ProcessGroup | None) -> tuple[ProcessGroup, int, int]:
    """``(group, its size, this process's rank in it)``; ``None`` is all processes, as elsewhere in torch.

    Raises:
        HostError: ``group`` is ``None`` and this process has joined no others.
    """
    chosen = groups.WORLD if group is None else group
    if chosen is None:
        raise HostError(
            "sequence parallelism needs a process group, and this process has none: start the job with torchrun, and "
            "call torch.distributed.init_process_group() first"
        )
    return chosen, chosen.size(), chosen.rank()


def gather_seq_scatter_heads(x: Tensor, seq_dim: int, head_dim: int, group: ProcessGroup | None = None) -> Tensor:
    """All positions of this rank's heads: ``[.., S/n, .., H, ..] -> [.., S, .., H/n, ..]``, e.g. ``[B, S/n, H, D]``
    with ``seq_dim=1``, ``head_dim=2`` to ``[B, S, H/n, D]``.

    Its backward is the inverse exchange, :func:`gather_heads_scatter_seq`.

    Args:
        x: all heads of this rank's positions.
        seq_dim: the dimension of the positions.
        head_dim: the dimension of the H heads.
        group: the n ranks that share the sequence; all ranks without it.

    Raises:
        ValueError: the group's size doesn't divide H.

    Example:
        >>> torch.distributed.init_process_group("fake", rank=0, world_size=4)  # stands for the first of four ranks
        >>> query = torch.zeros(2, 3, 8, 64)  # three positions of twelve, eight heads
        >>> gather_seq_scatter_heads(query, seq_dim=1, head_dim=2).shape
        torch.Size([2, 12, 2, 64])
    """
    return _swap(x, gathered=seq_dim, scattered=head_dim, group=group)


def gather_heads_scatter_seq(x: Tensor, head_dim: int, seq_dim: int, group: ProcessGroup | None = None) -> Tensor:
    """All heads of this rank's positions: ``[.., S, .., H/n, ..] -> [.., S/n, .., H, ..]``, e.g. ``[B, S, H/n, D]``
    with ``seq_dim=1``, ``head_dim=2`` to ``[B, S/n, H, D]``.

    Its backward is the inverse exchange, :func:`gather_seq_scatter_heads`.

    Args:
        x: this rank's heads of all S positions.
        head_dim: the dimension of the heads.
        seq_dim: the dimension of the positions.
        group: the n ranks that share the sequence; all ranks without it.

    Raises:
        ValueError: the group's size doesn't divide S.

    Example:
        >>> torch.distributed.init_process_group("fake", rank=0, world_size=4)  # stands for the first of four ranks
        >>> output = torch.zeros(2, 12, 2, 64)  # twelve positions, two heads of eight
        >>> gather_heads_scatter_seq(output, head_dim=2, seq_dim=1).shape
        torch.Size([2, 3, 8, 64])
    """
    return _swap(x, gathered=head_dim, scattered=seq_dim, group=group)


def scatter_attention_heads(
    query: Tensor, key: Tensor, value: Tensor, group: ProcessGroup | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`gather_seq_scatter_heads` of query, key and value, in one exchange.

    ``query[B, Hq, S/n, D]``, ``key[B, Hk, S/n, D]``, ``value[B, Hk, S/n, Dv]`` become ``[B, Hq/n, S, D]``,
    ``[B, hk, S, D]`` and ``[B, hk, S, Dv]``, strided views of one buffer. ``hk`` is ``Hk/n``; where there are fewer
    key heads than ranks it is 1, the head that this rank's query heads share, and its gradients are summed over the
    ranks that had a copy.

    Args:
        query: ``[B, Hq, S/n, D]``.
        key: ``[B, Hk, S/n, D]``.
        value: ``[B, Hk, S/n, Dv]``.
        group: the n ranks that share the sequence; all ranks without it.

    Raises:
        ValueError: n doesn't divide Hq, or neither of n and Hk divides the other.

    Example:
        >>> torch.distributed.init_process_group("fake", rank=0, world_size=4)  # stands for the first of four ranks
        >>> query, key, value = torch.zeros(1, 8, 3, 64), torch.zeros(1, 2, 3, 64), torch.zeros(1, 2, 3, 64)
        >>> [tuple(x.shape) for x in scatter_attention_heads(query, key, value)]  # two ranks share a key head
        [(1, 2, 12, 64), (1, 1, 12, 64), (1, 1, 12, 64)]
        >>> scatter_attention_heads(query[:, :6], key, value)
        Traceback (most recent call last):
            ...
        ValueError: sequence parallelism splits the attention heads over the ranks, but 4 does not divide 6 query
        heads; use 1, 2 or 6 ranks
    """
    group, ranks, _ = ranks_of(group)
    check_heads(query.shape[1], key.shape[1], ranks)
    copies = max(ranks // key.shape[1], 1)
    if copies > 1:
        key, value = (each.repeat_interleave(copies, dim=1) for each in (key, value))
    query, key, value = ScatterHeads.apply(group, ranks, query, key, value)
    return query, key, value


def check_heads(query_heads: int, key_heads: int, ranks: int) -> None:
    """Raise ``ValueError`` if the heads can't be split equally over ``ranks``."""
    if query_heads % ranks:
        raise ValueError(
            f"sequence parallelism splits the attention heads over the ranks, but {ranks} does not divide "
            f"{query_heads} query heads; use {_choices(query_heads, key_heads)} ranks"
        )
    if key_heads % ranks and ranks % key_heads:
        raise ValueError(
            f"sequence parallelism splits the attention heads over the ranks, but of {ranks} ranks and {key_heads} key "
            f"heads neither divides the other; use {_choices(query_heads, key_heads)} ranks"
        )


def _choices(query_heads: int, key_heads: int) -> str:
    fitting = [n for n in range(1, query_heads + 1) if not query_heads % n and (not key_heads % n or not n % key_heads)]
    return " or ".join(filter(None, (", ".join(map(str, fitting[:-1])), str(fitting[-1]))))


def _swap(x: Tensor, gathered: int, scattered: int, group: ProcessGroup | None) -> Tensor:
    group, ranks, _ = ranks_of(group)
    gathered, scattered = gathered % x.dim(), scattered % x.dim()
    if x.shape[scattered] % ranks:
        raise ValueError(f"dimension {scattered} of {tuple(x.shape)} can't be split equally over {ranks} ranks")
    return _Swap.apply(x, gathered, scattered, group)


def _all_to_all(parts: Tensor, group: ProcessGroup) -> Tensor:
    """Part r of ``parts[n, ...]`` goes to rank r; part r of the result came from rank r."""
    return collectives.wait_tensor(collectives.all_to_all_single(contiguous(parts), None, None, group))


class _Swap(torch.autograd.Function):
    """``_Swap.apply(x, gathered, scattered, group)``: all of one dimension, for a rank's part of another."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gathered: int, scattered: int, group: ProcessGroup) -> Tensor:
        ctx.how = gathered, scattered, group
        return _swapped(x, gathered, scattered, group)

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gathered, scattered, group = ctx.how
        return _swapped(gradients[0], scattered, gathered, group), None, None, None


def _swapped(x: Tensor, gathered: int, scattered: int, group: ProcessGroup) -> Tensor:
    parts = x.unflatten(scattered, (group.size(), -1)).movedim(scattered, 0)
    return merged(_all_to_all(parts, group).movedim(0, gathered), gathered)


class ScatterHeads(torch.autograd.Function):
    """Packs the parts for each rank directly from the strided inputs: one copy, one exchange.

    With a batch of one the received buffer is already in the order of the sequence, so no second copy follows.
    """

    @staticmethod
    def forward(ctx: Any, group: ProcessGroup, ranks: int, *tensors: Tensor) -> Tensors:
        ctx.group, ctx.ranks = group, ranks
        ctx.sizes = [(t.shape[1] // ranks, t.shape[3]) for t in tensors]
        # [B, n h, s, D] -> [n, B, s, h, D]
        by_rank = [t.unflatten(1, (ranks, -1)).permute(1, 0, 3, 2, 4) for t in tensors]
        received = _all_to_all(_packed(by_rank), group)
        whole = merged(received.transpose(0, 1), 1)
        return tuple(part.transpose(1, 2) for part in _unpacked(whole, ctx.sizes))

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        # [B, h, n s, D] -> [n, B, s, h, D]
        by_rank = [g.unflatten(2, (ctx.ranks, -1)).permute(2, 0, 3, 1, 4) for g in gradients]
        received = _all_to_all(_packed(by_rank), ctx.group)
        # [n, B, s, h, D] -> [B, n h, s, D], in memory [B, s, n h, D] as the projections want it
        parts = (merged(part.permute(1, 2, 0, 3, 4), 2) for part in _unpacked(received, ctx.sizes))
        return None, None, *(part.transpose(1, 2) for part in parts)


def _packed(parts: Sequence[Tensor]) -> Tensor:
    """Parts ``[n, B, s, h, D]``, concatenated along the last dimension: ``[n, B, s, sum of h * D]``."""
    widths = [part.shape[3] * part.shape[4] for part in parts]
    packed = parts[0].new_empty(*parts[0].shape[:3], sum(widths))
    for part, place in zip(parts, packed.split(widths, dim=-1), strict=True):
        copy(place.unflatten(-1, part.shape[3:]), part)
    return packed


def _unpacked(packed: Tensor, sizes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """The parts that :func:`_packed` concatenated, as views ``[..., h, D]``."""
    parts = packed.split([heads * width for heads, width in sizes], dim=-1)
    return [part.unflatten(-1, size) for part, size in zip(parts, sizes, strict=True)]
