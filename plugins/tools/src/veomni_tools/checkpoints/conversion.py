"""The same experts in another layout: which tensors are written, and their values, one expert at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from veomni_core.errors import CheckpointError
from veomni_tools.checkpoints.checkpoint import Checkpoint, StoredExperts
from veomni_tools.checkpoints.experts import ExpertParameter, Layout
from veomni_tools.checkpoints.weight_files import WeightFiles, itemsize

_PIECE = 2**26  # bytes of a tensor that is copied in one go


@dataclass(frozen=True)
class Output:
    """A tensor to write; ``parts()`` gives its values in order, in pieces along its first dimension."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: Callable[[], Iterable[Tensor]]

    @property
    def nbytes(self) -> int:
        """The bytes of its values."""
        return math.prod(self.shape) * itemsize(self.dtype)

    def whole(self) -> Tensor:
        """All values in memory."""
        return torch.cat([part.reshape(-1) for part in self.parts()]).reshape(self.shape)


def converted(checkpoint: Checkpoint, layout: Layout) -> Iterator[Output]:
    """The tensors of ``checkpoint`` with its experts in ``layout``; all others are as they are, names included.

    Raises:
        CheckpointError: an expert is missing, has another dtype than the others, or its layout is not known.
    """
    checkpoint.refuse_incomplete_experts()
    files = checkpoint.files
    by_name = {name: stored for stored in checkpoint.experts.values() for name in stored.names()}
    begun = set()
    for name, tensor in files.tensors.items():
        stored = by_name.get(name)
        if stored is None:
            yield Output(name, tensor.dtype, tensor.shape, lambda name=name: copied(files, name))  # type: ignore[misc]
        elif stored.parameter.name not in begun:
            begun.add(stored.parameter.name)
            yield from _experts(files, stored, layout)


def canonical(files: WeightFiles, stored: StoredExperts, expert: int) -> Tensor:
    """One expert's projection ``[outputs, inputs]``, or biases ``[outputs]``: those of gate, then those of up."""
    parameter, halves = stored.parameter, range(len(stored.parameter.leaves))
    if not stored.whole:
        return _cat([files.rows(stored.each[expert, half]) for half in halves])
    value = files.rows(stored.whole, expert, expert + 1)[0]
    if value.dim() == 2 and stored.layout is Layout.FUSED_TRANSPOSED:
        value = value.T
    return _cat([value[half :: len(halves)] for half in halves]) if parameter.interleaved else value


def in_layout(parameter: ExpertParameter, value: Tensor, layout: Layout) -> list[Tensor]:
    """One expert's tensors as ``layout`` stores them, from :func:`canonical`'s."""
    halves = list(value.chunk(len(parameter.leaves)))
    if layout is Layout.PER_EXPERT:
        return halves
    if parameter.interleaved:
        value = torch.stack(halves, dim=1).flatten(0, 1)
    return [value.T if value.dim() == 2 and layout is Layout.FUSED_TRANSPOSED else value]


def _experts(files: WeightFiles, stored: StoredExperts, layout: Layout) -> Iterator[Output]:
    parameter = stored.parameter
    dtypes = {files.tensors[name].dtype for name in stored.names()}
    if len(dtypes) > 1:
        raise CheckpointError(
            f"{files.folder}: the experts of {parameter.name} have several dtypes ({', '.join(sorted(dtypes))}), which "
            "one tensor can't hold. Save them in one dtype first"
        )
    (dtype,), shape = dtypes, parameter.stored_shape(layout)

    def of(experts: Iterable[int], part: int) -> Iterator[Tensor]:
        for expert in experts:
            yield in_layout(parameter, canonical(files, stored, expert), layout)[part]

    if layout is not Layout.PER_EXPERT:
        every = range(parameter.shape[0])
        yield Output(f"{stored.stem}.{parameter.leaf}", dtype, shape, lambda: of(every, 0))
        return
    for expert in range(parameter.shape[0]):
        for half, leaf in enumerate(parameter.leaves):
            name = f"{stored.stem}.{expert}.{leaf}"
            yield Output(name, dtype, shape, lambda e=expert, h=half: of([e], h))  # type: ignore[misc]


def copied(files: WeightFiles, name: str) -> Iterator[Tensor]:
    """A stored tensor as it is, in pieces along its first dimension."""
    tensor = files.tensors[name]
    if not tensor.shape or tensor.nbytes <= _PIECE:
        yield files.rows(name)
        return
    step = max(1, _PIECE * tensor.shape[0] // tensor.nbytes)
    for start in range(0, tensor.shape[0], step):
        yield files.rows(name, start, min(start + step, tensor.shape[0]))


def _cat(parts: list[Any]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)  # type: ignore[no-any-return]
