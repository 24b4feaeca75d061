"""Checks calls whose tensors have more than 2^31 elements, where an offset in 32 bits overflows.

A sample's rows are repeated until there are so many. Its last rows are compared, and the incoming gradient is zero in
all others, so that a float64 reference of these rows alone is the oracle of every gradient. Kernels of ops whose
contract names rows are called so, in 16 bits, on accelerators with the memory for it.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from veomni_conformance.report import CaseResult
from veomni_conformance.sample_rows import count_rows
from veomni_conformance.sample_tensors import map_tensors, to_float64, upstream_of
from veomni_conformance.situations import reveal
from veomni_conformance.subject import Outcome, Position, Subject
from veomni_ops.contract import Sample, Size

ELEMENTS = 2**31
_COPIES = 10  # of the largest tensor: inputs, results, gradients, and what a kernel computes in between


def asks_for_huge_calls(subject: Subject) -> bool:
    """Whether this kernel is called with them here: on an accelerator, in 16 bits, of an op with rows."""
    return bool(subject.device.type == "cuda" and subject.dtype.itemsize == 2 and subject.contract.rows)


def check_huge_calls(subject: Subject, positions: list[Position]) -> CaseResult:
    """Repeat the rows of the widest small sample until its largest tensor has more than 2^31 elements."""
    name, left_out = "past 2^31 elements", "past 2^31 elements (left out: not enough memory)"
    position = _widest(subject, positions)
    if position is None or _free(subject) < _COPIES * ELEMENTS * subject.dtype.itemsize:
        return CaseResult(left_out, ())
    short = False

    def problem() -> str | None:
        nonlocal short
        try:
            return _huge(subject, position)
        except torch.OutOfMemoryError:
            short = True
            return None

    failures = tuple(reveal("where offsets are past 2^31 elements", problem))
    if subject.device.type == "cuda":
        torch.cuda.empty_cache()
    return CaseResult(left_out if short else name, failures)


def _free(subject: Subject) -> int:
    return torch.cuda.mem_get_info(subject.device)[0] if subject.device.type == "cuda" else 0


def _widest(subject: Subject, positions: list[Position]) -> Position | None:
    """The small sample with the fewest rows for so many elements."""

    def rows_wide(position: Position) -> tuple[int, int]:
        inputs = subject.inputs(subject.sample(position))
        count = count_rows(subject.contract.rows, inputs)
        cut = [x for name, x in inputs.items() if name in subject.contract.rows]
        alike = bool(count) and all(x.shape[0] == count for x in cut) and all(x.numel() for x in cut)
        return (count, max(x.numel() // count for x in cut)) if alike else (0, 0)

    asked = [each for each in positions if each.size is Size.SMALL and all(rows_wide(each))]
    return max(asked, key=lambda each: rows_wide(each)[1], default=None)


def _huge(subject: Subject, position: Position) -> str | None:
    few = subject.draw(position)
    inputs = subject.inputs(few)
    cut = {id(x): x for name, x in inputs.items() if name in subject.contract.rows}
    count = count_rows(subject.contract.rows, inputs)
    widest = max(x.numel() for x in cut.values())
    times = ELEMENTS // widest + 2

    def repeated(x: Tensor) -> Tensor:
        if id(x) not in cut:
            return x
        return x.detach().repeat(times, *[1] * (x.dim() - 1)).requires_grad_(x.requires_grad)

    def only_last(result: Tensor) -> Tensor:
        sent = torch.zeros_like(result, memory_format=torch.contiguous_format)
        sent[-count:] = upstream_of(result[-count:])
        return sent

    many: Sample = replace(map_tensors(few, repeated), name=few.name)
    found = subject.outcome(many, only_last)
    exact = subject.reference(to_float64(few))
    names = {name for name, x in inputs.items() if id(x) in cut}
    gradients = {name: x[-count:] if x is not None and name in names else x for name, x in found.gradients.items()}
    return subject.problem(Outcome(tuple(result[-count:] for result in found.results), gradients), exact)
