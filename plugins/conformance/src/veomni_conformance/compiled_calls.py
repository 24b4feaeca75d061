"""Checks that compiled calls are right, and captured whole and once for all numbers of rows by kernels that promise it.

A model that is compiled reaches every kernel in it, with a graph break where the kernel can't be captured. The captured
graph runs by PyTorch's own operators (backend ``eager``, or ``aot_eager`` where one graph is promised): what a compiler
makes of it is not checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from veomni_conformance.sample_rows import count_rows, select_rows
from veomni_conformance.sample_tensors import copy_of, to_float64
from veomni_conformance.situations import reveal
from veomni_conformance.subject import Position, Subject
from veomni_ops.contract import Sample

_BATCHES = (4, 7, 12)  # torch.compile makes graphs of their own for 0 and 1


def check_compiled_calls(subject: Subject, position: Position) -> Iterator[str]:
    """Compile a call with ``fullgraph=True`` and dynamic shapes; run it on the sample, and on other numbers of rows."""
    yield from reveal("where torch.compile captures it whole", lambda: _compiled(subject, position))


def check_compiled_with_breaks(subject: Subject, position: Position) -> Iterator[str]:
    """Compile calls of a kernel that may break the graph: on a sample, and on other values of its shapes."""

    def compiled() -> str | None:
        kernel = subject.kernel
        subject.kernel = torch.compile(_own_code(kernel), backend="eager")
        try:
            return subject.plain_problem(position) or subject.plain_problem(position, other=True)
        finally:
            subject.kernel = kernel

    yield from reveal("under torch.compile", compiled)


def _compiled(subject: Subject, position: Position) -> str | None:
    from torch._dynamo.backends.debugging import aot_eager

    graphs = 0

    def counting(graph: Any, inputs: Any, **options: Any) -> Callable[..., Any]:
        nonlocal graphs
        graphs += 1
        return aot_eager(graph, inputs, **options)

    kernel = subject.kernel
    subject.kernel = torch.compile(_own_code(kernel), fullgraph=True, dynamic=True, backend=counting)
    try:
        for sample in _batches(subject, position):
            exact = subject.reference(to_float64(copy_of(sample)))
            if problem := subject.problem(subject.outcome(sample), exact):
                return problem
    finally:
        subject.kernel = kernel
    return None if graphs == 1 else f"it is compiled {graphs} times for {len(_BATCHES)} numbers of rows"


def _own_code(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel in a function of its own: torch.compile limits how often one code object is compiled in a process."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return kernel(*args, **kwargs)

    call.__code__ = call.__code__.replace()
    return call


def _batches(subject: Subject, position: Position) -> Iterator[Sample]:
    sample = subject.draw(position)
    inputs = subject.inputs(sample)
    count = count_rows(subject.contract.rows, inputs)
    if not count:
        yield sample
        return
    for rows in _BATCHES:
        yield select_rows(subject.contract.rows, inputs, sample, [row % count for row in range(rows)])
