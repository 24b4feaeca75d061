"""Divides what a tower is given into parts, one for each of several ranks, and proves that this changes no feature.

Pictures and sounds of a batch do not see one another in a tower, and in most towers frames of a video don't either. So
ranks can compute the features of some of them each. Whether a tower is such a one is found by running a small copy of
it, on the whole and on the parts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, groupby, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils.generic import ModelOutput

from veomni_core.errors import ConfigError
from veomni_transformers.proving import probe
from veomni_transformers.towers.feature_calls import UNREAD, FeatureCall
from veomni_transformers.towers.host_metadata import is_open
from veomni_transformers.towers.smallest_input import Inputs, forms, small_copy

_GRID = "grid_thw"
_OF_MEDIA = ("image_", "video_", "audio_")
_RANKS = 5  # of the proof: of the parts of its three videos one ends within a video, and one is empty
_ALONE = "given alone,"
_BATCH_NORMS = nn.modules.batchnorm._BatchNorm


@dataclass(frozen=True)
class Part:
    """What one rank gives the tower: ``numbers`` are the media, whole or a part of their frames, that ``inputs`` has.

    A part without a medium of its own has the smallest one of all, so that every rank runs the tower (FSDP2 needs it),
    and ``stands_in``: its features are left out.
    """

    inputs: dict[str, Any]
    numbers: tuple[int, ...]
    stands_in: bool


@dataclass(frozen=True)
class Division:
    """How the inputs of one method are divided: by frames, or by whole pictures, videos and sounds.

    Attributes:
        call: the method.
        by_frames: whether a part may end within a video.
        why_not: why every rank must run the tower on the whole; empty if the inputs can be divided.
    """

    call: FeatureCall
    by_frames: bool = False
    why_not: str = ""
    named: frozenset[str] = field(default=frozenset(), repr=False)
    is_open: bool = field(default=False, repr=False)

    def parts(self, inputs: Mapping[str, Any], ranks: int) -> list[Part]:
        """The parts of the method's keyword arguments, neighbouring media on one rank, about equally many patches each.

        Waits for the device where there are grids. What was computed before for the whole (``image_cu_seqlens``) is
        left out: the tower computes it for its part.

        Raises:
            ConfigError: it isn't known how to divide one of the arguments.
        """
        media = inputs[self.call.argument]
        grid = next((name for name in self.named if name.endswith(_GRID) and inputs.get(name) is not None), "")
        shapes = inputs[grid].tolist() if grid else [[1, 1, 1] for _ in media]
        step = [1 if self.by_frames else frames for frames, _, _ in shapes]
        units = [number for number, (frames, _, _) in enumerate(shapes) for _ in range(frames // step[number])]
        sizes = [step[number] * shapes[number][1] * shapes[number][2] for number in units]
        ends = [0, *accumulate(sizes)]
        ranks_of = [(start + end) * ranks // (2 * ends[-1]) for start, end in pairwise(ends)]
        smallest = sizes.index(min(sizes))

        def part(rank: int) -> Part:
            mine = [unit for unit, owner in enumerate(ranks_of) if owner == rank]
            first, last = (mine[0], mine[-1] + 1) if mine else (smallest, smallest + 1)
            rows = [(number, len([*found]) * step[number]) for number, found in groupby(units[first:last])]
            cut: dict[str, Any] = {}
            for name, value in inputs.items():
                if grid and name == self.call.argument:
                    cut[name] = value[ends[first] : ends[last]]
                elif name == grid:
                    cut[name] = value.new_tensor([[frames, *shapes[number][1:]] for number, frames in rows])
                elif not self.is_open or name in self.named or not name.startswith(_OF_MEDIA):
                    cut[name] = self._cut(name, value, slice(first, last), 0 if grid else len(units))
            return Part(cut, tuple(number for number, _ in rows), not mine)

        return [part(rank) for rank in range(ranks)]

    def _cut(self, name: str, value: Any, which: slice, media: int) -> Any:
        several = value.dim() > 0 if isinstance(value, Tensor) else isinstance(value, list) and not _plain(value)
        if not several or not (name in self.named or name.startswith(_OF_MEDIA)):
            return value
        if len(value) != media:
            raise ConfigError(
                f"sequence-parallel ranks divide the {self.call.modality}s of a batch, and {name} has {len(value)} "
                f"rows for {media or self.call.modality + 's of a grid'}; call the model with one row for each, or "
                "without it"
            )
        return value[which]


def division_of(module: Any, call: FeatureCall) -> Division:
    """How the inputs of ``call`` on ``module`` can be divided, proven on a small copy of its towers on the CPU.

    Features of videos and pictures of several sizes, or of two pictures or sounds of which one is zeros, must be those
    of the parts. Since that holds at random weights, it holds for gradients too.
    """
    method = getattr(type(module), call.method, None)
    named = frozenset([*inspect.signature(method).parameters][1:]) if method else frozenset()
    whole = Division(call, named=named, is_open=bool(method) and is_open(method), why_not=call.why_not)
    if call.why_not:
        return whole
    if any(isinstance(each, _BATCH_NORMS) for each in module.modules()):
        return replace(whole, why_not="its batch norms average over all of a batch")
    with probe.seeded(), torch.no_grad():
        for repeated in (False, True):
            small, failed = probe.attempt(partial(small_copy, module, 2, repeated=repeated))
            if failed:
                break
            failed = "no part of it takes such inputs"
            for inputs in (each for one in forms(module, call) for each in _several(call, one)):
                grid = next((value for name, value in inputs.items() if name.endswith(_GRID)), None)
                if grid is not None and not repeated:  # where it is cheap, layers of all kinds run
                    continue
                why_not, failed = probe.attempt(partial(_why_not, small, whole, inputs))
                if failed:
                    continue
                whole = replace(whole, why_not=why_not)
                if _ALONE in why_not:  # as a picture of one row in Mistral 3
                    continue
                if not why_not and grid is not None and (grid[:, 0] > 1).any():
                    frames = replace(whole, by_frames=True)
                    whole = whole if _why_not(small, frames, inputs) else frames
                return whole
    return replace(whole, why_not=whole.why_not or failed)


def _why_not(small: Any, division: Division, inputs: Inputs) -> str:
    """Why the features of all inputs are not those of the parts; empty if they are. Raises what the whole raises."""
    call = division.call
    run = getattr(small, call.method)
    wanted = slots_of(run(**inputs), call.field)
    if not wanted or not all(slot.rows.numel() and slot.rows.isfinite().all() for slot in wanted):
        raise ValueError("the features are empty or not finite")
    parts = [part for part in division.parts(inputs, _RANKS) if not part.stands_in]
    found, failed = probe.attempt(lambda: [slots_of(run(**part.inputs), call.field) for part in parts])
    if failed:
        return f"{_ALONE} some {call.modality}s of a batch end in {failed}"
    for number, slot in enumerate(wanted):
        rows = torch.cat([each[number].rows for each in found])
        sizes = [(part.numbers, each[number].sizes) for part, each in zip(parts, found, strict=True)]
        if not probe.close(rows, slot.rows) or whole_sizes(sizes, slot.sizes) != slot.sizes:
            return f"features of {call.modality}s depend on the others of the batch"
    return ""


@dataclass(frozen=True)
class Slot:
    """One result: ``rows`` of all media, and how many of them each has where they are apart (else ``None``)."""

    rows: Tensor
    sizes: list[int] | None


def slots_of(output: Any, field: str) -> list[Slot]:
    """The results in such a method's output: ``field``, and those of early layers (deepstack).

    Raises:
        TypeError: they are neither tensors nor lists of tensors.
    """
    found: list[Slot] = []

    def note(slot: Slot) -> Slot:
        found.append(slot)
        return slot

    with_slots(output, field, note)
    return found


def with_slots(output: Any, field: str, change: Callable[[Slot], Slot]) -> Any:
    """A method's output with each slot changed; fields that its caller does not read are left out."""
    if not isinstance(output, ModelOutput):
        return _changed(output, change)
    changed = {}
    for name, value in output.items():
        if name == field:
            changed[name] = _changed(value, change)
        elif name not in UNREAD:  # one result of each of several layers
            by_layer = isinstance(value, list | tuple)
            changed[name] = [_changed(each, change) for each in value] if by_layer else _changed(value, change)
    return type(output)(**changed)


def _changed(value: Any, change: Callable[[Slot], Slot]) -> Any:
    if isinstance(value, Tensor):
        return change(Slot(value, None)).rows
    if not isinstance(value, list | tuple) or not all(isinstance(each, Tensor) for each in value):
        raise TypeError(f"features are a {type(value).__name__} of others than tensors")
    new = change(Slot(torch.cat([*value]), [len(each) for each in value]))
    return type(value)(new.rows.split(new.sizes or []))


def whole_sizes(parts: Iterable[tuple[tuple[int, ...], list[int] | None]], like: list[int] | None) -> list[int] | None:
    """The rows of each medium, of which neighbouring parts may hold some frames each; ``None`` where ``like`` is."""
    if like is None:
        return None
    total: dict[int, int] = {}
    for numbers, sizes in parts:
        for number, size in zip(numbers, sizes or (), strict=True):
            total[number] = total.get(number, 0) + size
    return [*total.values()]


def _several(call: FeatureCall, one: Inputs) -> Iterator[Inputs]:
    """Several media of the form of ``one``: three on a grid, with frames and without, or two of which one is zeros."""
    grid = next((name for name in one if name.endswith(_GRID)), None)
    if grid is not None:
        side, width = int(one[grid][0, 1]), one[call.argument].shape[1]
        for frames in ((2, 1, 3), (1, 1, 1)):
            areas = ((side, side), (2 * side, 10 * side), (2 * side, side))  # the second has several windows
            shapes = torch.tensor([[many, *area] for many, area in zip(frames, areas, strict=True)])
            yield {call.argument: probe.random(int(shapes.prod(-1).sum()), width), grid: shapes}
        return
    two = {name: torch.cat([value, value]) for name, value in one.items()}
    two[call.argument] = torch.cat([probe.random(*one[call.argument].shape), torch.zeros_like(one[call.argument])])
    for name in two:
        if call.modality == "audio" and name.endswith("_mask"):
            two[name][1, two[name].shape[1] // 2 :] = 0
    yield two


def _plain(value: list[Any]) -> bool:
    return not any(isinstance(each, Tensor | list | tuple) for each in value)
