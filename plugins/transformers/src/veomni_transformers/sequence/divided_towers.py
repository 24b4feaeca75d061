"""Towers whose pictures, frames and sounds the ranks of a sequence share, each computing the features of its own.

The ranks then gather all features, which each of them puts among its words. In backward a feature's gradients are
summed over the ranks, of which one holds its position; so the mean over the ranks of the tower's gradients is that of
one process, as it is for the decoder's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup
from torch.distributed import _functional_collectives as collectives
from torch.nn import functional as F

from veomni_core.changes.change import Change, ClassChange
from veomni_transformers.towers.division import Division, Slot, division_of, slots_of, whole_sizes, with_slots
from veomni_transformers.towers.feature_calls import feature_calls


def divisions(model: nn.Module, group: ProcessGroup) -> list[tuple[str, Division]]:
    """How the ranks of ``group`` divide the inputs of each tower of ``model``, with the module's path that calls it.

    Each rank proves it by itself. What one of them can't, for want of memory, stays whole on all: they would wait for
    features that never come.
    """
    found = [
        (path, division_of(model.get_submodule(path), call)) for path, calls in feature_calls(model) for call in calls
    ]
    mine = [(each.by_frames, each.why_not) for _, each in found]
    answers: list[Any] = [None] * group.size()
    distributed.all_gather_object(answers, mine, group=group)
    agreed = []
    for (path, division), *outcomes in zip(found, *answers, strict=True):
        why_not = next((f"rank {rank}: {why}" for rank, (_, why) in enumerate(outcomes) if why), "")
        by_frames = all(frames for frames, _ in outcomes)
        if not division.why_not:
            division = replace(division, by_frames=by_frames, why_not=why_not)
        agreed.append((path, division))
    return agreed


def division_changes(
    model: nn.Module, found: Sequence[tuple[str, Division]], group: ProcessGroup
) -> Iterator[tuple[str, Change]]:
    """The changes, with their module paths, by which the ranks of ``group`` divide what can be divided."""
    running: list[str] = []
    for path, division in found:
        if not division.why_not:
            module = model.get_submodule(path)
            name = division.call.method
            yield path, ClassChange(module, name, divided(getattr(type(module), name), division, group, running))


def described(found: Sequence[tuple[str, Division]]) -> str:
    """For receipts: ``image and video features divided over the ranks, audio features whole on each (why)``."""
    shared = [each.call.modality for _, each in found if not each.why_not]
    said = [f"{' and '.join(shared)} features divided over the ranks"] if shared else []
    for _, each in found:
        if each.why_not:
            said.append(f"{each.call.modality or each.call.argument} features whole on each rank ({each.why_not})")
    return ", ".join(said)


def divided(method: Callable[..., Any], division: Division, group: ProcessGroup, running: list[str]) -> Any:
    """``method``, a function of ``self`` that makes features, in which each rank makes those of its part.

    While ``running`` has an entry, a method runs whole: that for videos may call that for images.
    """
    call, parameters = division.call, [*inspect.signature(method).parameters][1:]

    @wraps(method)
    def features(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(parameters, args, strict=False)), **kwargs}
        if running or given.get(call.argument) is None or not len(given[call.argument]):
            return method(self, *args, **kwargs)
        parts = division.parts(given, group.size())
        mine = parts[group.rank()]
        running.append(call.method)
        try:
            output = method(self, **mine.inputs)
        finally:
            running.clear()
        slots = slots_of(output, call.field)
        if mine.stands_in:
            slots = [Slot(slot.rows[:0], slot.sizes and [0] * len(slot.sizes)) for slot in slots]
        counts, sizes = _exchanged(slots, max(len(part.numbers) for part in parts), group)
        rows = _Gather.apply(group, counts, *(slot.rows for slot in slots))
        numbers = [() if part.stands_in else part.numbers for part in parts]
        wholes = iter(
            Slot(
                each, whole_sizes(((of, size[: len(of)]) for of, size in zip(numbers, found, strict=True)), slot.sizes)
            )
            for each, slot, found in zip(rows, slots, sizes, strict=True)
        )
        return with_slots(output, call.field, lambda _: next(wholes))

    return features


def _exchanged(slots: Sequence[Slot], most: int, group: ProcessGroup) -> tuple[list[list[int]], list[list[list[int]]]]:
    """By slot and rank: how many rows it has, and how many of each of its media. Waits for the device."""
    mine = [[len(slot.rows), *(slot.sizes or []), *[0] * (most - len(slot.sizes or []))] for slot in slots]
    sent = torch.tensor(mine, device=slots[0].rows.device)
    every = collectives.wait_tensor(collectives.all_gather_tensor(sent, 0, group)).unflatten(0, (-1, len(slots)))
    found = every.transpose(0, 1).tolist()
    return [[each[0] for each in slot] for slot in found], [[each[1:] for each in slot] for slot in found]


class _Gather(torch.autograd.Function):
    """All ranks' rows of several tensors; in backward the sum over the ranks of the gradients of this rank's rows.

    One function for all tensors: on each rank their collectives follow one another in the same order.
    """

    @staticmethod
    def forward(ctx: Any, group: ProcessGroup, counts: list[list[int]], *mine: Tensor) -> tuple[Tensor, ...]:
        ctx.group, ctx.counts = group, counts
        return tuple(_gathered(each, count, group) for each, count in zip(mine, counts, strict=True))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        needed = zip(gradients, ctx.counts, ctx.needs_input_grad[2:], strict=True)
        return None, None, *(_summed(each, count, ctx.group) if asked else None for each, count, asked in needed)


def _gathered(mine: Tensor, counts: list[int], group: ProcessGroup) -> Tensor:
    every = collectives.wait_tensor(collectives.all_gather_tensor(_padded(mine, max(counts)), 0, group))
    return torch.cat([each[:count] for each, count in zip(every.split(max(counts)), counts, strict=True)])


def _summed(gradient: Tensor, counts: list[int], group: ProcessGroup) -> Tensor:
    by_rank = torch.cat([_padded(each, max(counts)) for each in gradient.split(counts)])
    summed = collectives.wait_tensor(collectives.reduce_scatter_tensor(by_rank, "sum", 0, group))
    return summed[: counts[group.rank()]]


def _padded(rows: Tensor, length: int) -> Tensor:
    return F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, length - len(rows))).contiguous()
