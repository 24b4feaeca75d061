"""Calls made from a contract's sample: other rows, values, memory, frozen inputs. No op is known here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from veomni_conformance.sample_rows import count_rows, select_rows
from veomni_conformance.sample_tensors import copy_of, map_tensors
from veomni_conformance.subject import Outcome, Subject
from veomni_conformance.tensor_layouts import LAYOUTS
from veomni_ops.contract import Contract, Sample

USUAL, INFINITE, ONE = "usual", "infinite", "one"
VALUES = (USUAL, "large", "denormal", "zero", "equal", INFINITE)
_NUDGE = 1e-12  # far above the rounding of float64, far below any difference between scores
_JUMP = 1e-2  # the relative change of a norm if one choice in ten thousand turns out differently
MEMORY = (USUAL, *LAYOUTS, "overlapping", "expanded")


@dataclass(frozen=True)
class SampleChange:
    """What is changed in a sample. Entries for tensors are used in turn, if there are more tensors than entries.

    Attributes:
        rows: the rows of the call, counted modulo the sample's; ``None`` leaves them.
        values: for each input that wants a gradient, one of :data:`VALUES`, or ``one``; ``infinite`` is its first
            element only. How large, and whether denormal, the op's contract says, and in which range an input stays.
        memory: for each tensor, one of :data:`MEMORY`.
        frozen: for each input that wants a gradient, whether it is frozen.
        shared: inputs of one shape, dtype and range lie over each other in one memory.
    """

    rows: tuple[int, ...] | None = None
    values: tuple[str, ...] = (USUAL,)
    memory: tuple[str, ...] = (USUAL,)
    frozen: tuple[bool, ...] = (False,)
    shared: bool = False

    def __str__(self) -> str:
        parts = []
        if self.rows is not None:
            parts.append(f"{len(self.rows)} {'row' if len(self.rows) == 1 else 'rows'}")
        for words, entries in (("values", self.values), ("memory", self.memory)):
            if set(entries) != {USUAL}:
                parts.append(f"{words} {' / '.join(entries)}")
        if self.shared:
            parts.append("inputs over each other in memory")
        if any(self.frozen):
            parts.append(f"frozen {' / '.join('yes' if each else 'no' for each in self.frozen)}")
        return ", ".join(parts) or "as it is"

    def applied(self, subject: Subject, sample: Sample) -> Sample:
        """The changed call. ``sample`` is left as it is."""
        sample = copy_of(sample)
        if self.rows is not None:
            rows, inputs = subject.contract.rows, subject.inputs(sample)
            if count := count_rows(rows, inputs):
                sample = select_rows(rows, inputs, sample, [row % count for row in self.rows])
        sample = self._with_values(subject, sample)
        if self.shared:
            sample = _over_each_other(subject, sample)
        sample = self._with_memory(sample)
        return self._with_frozen(sample)

    def _with_values(self, subject: Subject, sample: Sample) -> Sample:
        contract = subject.contract
        changed = {
            id(tensor): _within(_valued(tensor, self.values[index % len(self.values)], contract), name, contract)
            for index, (name, tensor) in enumerate(subject.differentiable(sample).items())
        }
        return map_tensors(sample, lambda tensor: _leaf(changed.get(id(tensor), tensor), tensor))

    def _with_memory(self, sample: Sample) -> Sample:
        index = -1

        def lay_out(tensor: Tensor) -> Tensor:
            nonlocal index
            index += 1
            kind = self.memory[index % len(self.memory)]
            # A change of values is for tensors that may have any: not for indices and masks.
            keeps_values = kind in LAYOUTS
            if kind == USUAL or not tensor.dim() or not (keeps_values or tensor.requires_grad):
                return tensor
            return _leaf(_IN_MEMORY[kind](tensor.detach()), tensor)

        return map_tensors(sample, lay_out)

    def _with_frozen(self, sample: Sample) -> Sample:
        index = -1

        def freeze(tensor: Tensor) -> Tensor:
            nonlocal index
            if not tensor.requires_grad:
                return tensor
            index += 1
            return tensor.detach().requires_grad_(not self.frozen[index % len(self.frozen)])

        return map_tensors(sample, freeze)


def nudged(sample: Sample, by: float, absolute: float = 0.0) -> Sample:
    """The sample with its floating-point values changed by about ``by`` of themselves, and by about ``absolute``."""
    generator = torch.Generator().manual_seed(0)

    def nudge(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor)
        return _leaf(tensor.detach() * (1 + by * noise) + absolute * noise, tensor)

    return replace(map_tensors(sample, nudge), name=sample.name)


def is_a_choice(subject: Subject, sample: Sample, exact: Outcome, usual: Outcome) -> bool:
    """Whether the oracle jumps, by the measure of ``usual``, where values of ``sample`` change by next to nothing.

    A top k does so if scores are equal. Which of them it takes is unspecified, so that no single answer is right.

    Args:
        subject: what is checked.
        sample: in float64.
        exact: the oracle's outcome on it.
        usual: the oracle's outcome on the unchanged sample.
    """
    near = subject.reference(nudged(sample, _NUDGE, absolute=_NUDGE))
    triples = [*zip(near.results, exact.results, usual.results, strict=True)]
    for name, gradient in exact.gradients.items():
        moved, before = near.gradients[name], usual.gradients[name]
        if gradient is not None and moved is not None and before is not None:
            triples.append((moved, gradient, before))
    return any(float((a - b).double().norm()) > _JUMP * float(c.double().norm()) for a, b, c in triples)


def _leaf(tensor: Tensor, like: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(like.requires_grad)


def _valued(tensor: Tensor, kind: str, contract: Contract) -> Tensor:
    tensor = tensor.detach()
    if kind == USUAL or not tensor.numel():
        return tensor
    if kind == "large":
        return tensor * contract.large_factor
    if kind == "denormal":
        return tensor * torch.finfo(tensor.dtype).tiny if contract.denormal_inputs else tensor
    if kind == "zero":
        return torch.zeros_like(tensor)
    if kind == ONE:
        return torch.ones_like(tensor)
    if kind == "equal":
        return torch.full_like(tensor, 0.5)
    changed = tensor.clone()
    changed[(0,) * changed.dim()] = float("-inf")
    return changed


def _within(tensor: Tensor, name: str, contract: Contract) -> Tensor:
    """``tensor`` with what is outside the range of the parameter called ``name`` at the range's end."""
    return tensor.clamp(*contract.ranges[name]) if name in contract.ranges else tensor


def _windows(tensor: Tensor) -> Tensor:
    """Rows that begin one element after each other, as windows over a signal do. The values are others."""
    if tensor.dim() < 2 or not tensor.numel():
        return tensor
    *outer, width = tensor.shape
    count = tensor.numel() // width
    signal = tensor.reshape(-1)[: count + width - 1]
    if signal.numel() < count + width - 1:
        return tensor
    return torch.as_strided(signal, (*outer, width), (*torch.empty(outer, device="meta").stride(), 1))


def _one_row(tensor: Tensor) -> Tensor:
    return tensor[:1].expand(tensor.shape) if tensor.shape[0] else tensor


def _over_each_other(subject: Subject, sample: Sample) -> Sample:
    """Put inputs of one shape, dtype and range into one memory, each one element after the other. Values change."""
    ranges = {id(tensor): subject.contract.ranges.get(name) for name, tensor in subject.inputs(sample).items()}
    memory: dict[object, Tensor] = {}
    offsets: dict[object, int] = {}

    def place(tensor: Tensor) -> Tensor:
        if not tensor.requires_grad or not tensor.numel():
            return tensor
        key = (tensor.shape, tensor.dtype, ranges[id(tensor)])
        if key not in memory:
            flat = tensor.detach().reshape(-1)
            memory[key], offsets[key] = torch.cat((flat, flat[: min(8, flat.numel())])), 0
        offset = offsets[key]
        if offset + tensor.numel() > memory[key].numel():
            return tensor
        offsets[key] += 1
        return _leaf(memory[key][offset : offset + tensor.numel()].view(tensor.shape), tensor)

    return map_tensors(sample, place)


_IN_MEMORY: dict[str, Callable[[Tensor], Tensor]] = {**LAYOUTS, "overlapping": _windows, "expanded": _one_row}
