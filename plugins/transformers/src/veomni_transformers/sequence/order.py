"""The order in which ranks hold a sequence: one part each, or, for ring attention, two of twice as many (zig-zag).

In zig-zag order slot c of a ring of n slots holds parts c and 2n - 1 - c of 2n, so that causal attention gives all of
them equal work. A slot is one rank, or several neighbours that exchange its positions for heads (Ulysses): each of
those holds two neighbouring parts of the slot's.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from veomni_core.kernels import first_derivatives_only
from veomni_transformers.sequence.copies import copy
from veomni_transformers.sequence.slicing import gather_outputs, slice_input_tensor


class Order:
    """Which positions the ranks of ``group`` hold, of which each ``heads`` neighbours are a slot of a ring.

    Attributes:
        group: the n ranks that share a sequence.
        heads: the ranks that exchange heads with this one; ``None`` where those are no others.
        slots: how many slots the ring has; 1 without a ring.

    Example:
        >>> torch.distributed.init_process_group("fake", rank=1, world_size=4)  # stands for the second of four ranks
        >>> order = Order(torch.distributed.group.WORLD, None, slots=4)
        >>> order.part(torch.arange(16), 0)
        tensor([ 2,  3, 12, 13])
    """

    def __init__(self, group: ProcessGroup, heads: ProcessGroup | None, slots: int = 1) -> None:
        self.group, self.heads, self.slots = group, heads, slots

    @property
    def multiple(self) -> int:
        """What must divide a sequence's length."""
        return len(self._places)

    @property
    def numbers(self) -> list[int]:
        """The numbers of this rank's parts, of :attr:`multiple` in a sequence."""
        each = self.multiple // self.group.size()
        return self._places[self.group.rank() * each : (self.group.rank() + 1) * each]

    @cached_property
    def _places(self) -> list[int]:
        """The numbers of all ranks' parts, one rank after the other."""
        if self.slots == 1:
            return list(range(self.group.size()))
        inside = self.group.size() // self.slots
        starts = [start for slot in range(self.slots) for start in (slot, 2 * self.slots - 1 - slot)]
        return [start * inside + place for start in starts for place in range(inside)]

    def part(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part of ``x``: ``[.., S, ..] -> [.., S/n, ..]``; a view where it is in one piece."""
        if self.slots == 1:
            return slice_input_tensor(x, dim, self.group)
        pieces = x.unflatten(dim, (self.multiple, -1))
        return torch.cat([pieces.select(dim % x.dim(), number) for number in self.numbers], dim)

    def in_order(self, x: Tensor, dim: int) -> Tensor:
        """All positions, of which ``x`` has those of one rank after the other, as they follow in the sequence."""
        places = [self._places.index(number) for number in range(self.multiple)]
        return x if self.slots == 1 else _Permuted.apply(x, dim % x.dim(), places)

    def by_ranks(self, x: Tensor, dim: int) -> Tensor:
        """The inverse of :meth:`in_order`."""
        return x if self.slots == 1 else _Permuted.apply(x, dim % x.dim(), self._places)

    def whole(self, x: Tensor, dim: int) -> Tensor:
        """Every rank's part ``[.., S/n, ..]``, joined as they follow in the sequence. Takes no gradient."""
        return self.in_order(gather_outputs(x, dim, self.group), dim)


class _Permuted(torch.autograd.Function):
    """``_Permuted.apply(x, dim, places)``: the equal pieces of a dimension, in the order of their places."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, places: list[int]) -> Tensor:
        ctx.dim, ctx.places = dim, places
        return _permuted(x, dim, places)

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        places = ctx.places
        return _permuted(gradients[0], ctx.dim, [places.index(place) for place in range(len(places))]), None, None


def _permuted(x: Tensor, dim: int, places: list[int]) -> Tensor:
    permuted = torch.empty_like(x, memory_format=torch.contiguous_format)
    targets, pieces = (each.unflatten(dim, (len(places), -1)).unbind(dim) for each in (permuted, x))
    for target, place in zip(targets, places, strict=True):
        copy(target, pieces[place])
    return permuted
