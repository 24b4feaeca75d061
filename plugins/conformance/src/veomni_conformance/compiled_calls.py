"""Checks that compiled calls are right, and captured whole and once for all numbers of rows by kernels that promise it.

A model that is compiled reaches every kernel in it, with a graph break where the kernel can't be captured. The captured
graph runs by PyTorch's own operators (backend ``eager``, or ``aot_eager`` where one graph is promised): what a compiler
makes of it is not checked.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from veomni_conformance.sample_rows import count_rows, select_rows
from veomni_conformance.sample_tensors import copy_of, to_float64
from veomni_conformance.situations import reveal
from veomni_conformance.subject import Position, Subject
from veomni_ops.contract import Sample

_BATCHES = (4, 7, 12)  # torch.compile makes graphs of their own for 0 and 1


def check_compiled_calls(subject: Subject, position: Position) -> Iterator[str]:
    """Compile a call with ``fullgraph=True`` and dynamic shapes; run it on the sample, and on other numbers of rows."""
    yield from reveal("where torch.compile captures it whole", lambda: _compiled(subject, position))


def check_compiled_options(subject: Subject, positions: list[Position]) -> Iterator[str]:
    """Compile calls that have every option among them, and call each on other values too.

    In one graph each, where the kernel promises that; else it may break the graph.
    """

    def compiled(position: Position) -> str | None:
        with _compiling(subject, backend="eager", fullgraph=subject.spec.fullgraph):
            return subject.plain_problem(position) or subject.plain_problem(position, other=True)

    for position in _with_every_option(subject, positions):
        name = subject.sample(position).name
        yield from reveal(f"under torch.compile, as sample {name!r} shows", partial(compiled, position))


def _with_every_option(subject: Subject, positions: list[Position]) -> Iterator[Position]:
    """The fewest samples with every option among them, of small ones whose results and gradients aren't all zeros."""
    telling = [each for each in positions if subject.is_asked_more(each) and subject.tells(each)]
    samples = {each: subject.sample(each) for each in telling or positions[:1]}
    sizes = {each: sum(x.numel() for x in subject.inputs(sample).values()) for each, sample in samples.items()}
    given = {each: frozenset(_options(subject, sample)) for each, sample in samples.items()}
    left = frozenset[object]().union(*given.values())
    while left:
        position = max(given, key=lambda each: (len(given[each] & left), -sizes[each]))
        yield position
        left -= given[position]


def _options(subject: Subject, sample: Sample) -> Iterator[object]:
    """What differs from the usual call, by argument: a tensor, a certain word, or another value."""
    declared = inspect.signature(subject.contract.reference).parameters
    for name, value in (*zip(subject.parameters, sample.args, strict=False), *sample.kwargs.items()):
        usual = declared[name].default if name in declared else None
        if isinstance(value, Tensor):
            yield name, "a tensor"
        elif value != (None if usual is inspect.Parameter.empty else usual):
            yield name, value if isinstance(value, str) else "another value"


def _compiled(subject: Subject, position: Position) -> str | None:
    from torch._dynamo.backends.debugging import aot_eager

    graphs = 0

    def counting(graph: Any, inputs: Any, **options: Any) -> Callable[..., Any]:
        nonlocal graphs
        graphs += 1
        return aot_eager(graph, inputs, **options)

    with _compiling(subject, fullgraph=True, dynamic=True, backend=counting):
        for sample in _batches(subject, position):
            exact = subject.reference(to_float64(copy_of(sample)))
            if problem := subject.problem(subject.outcome(sample), exact):
                return problem
    return None if graphs == 1 else f"it is compiled {graphs} times for {len(_BATCHES)} numbers of rows"


@contextmanager
def _compiling(subject: Subject, **options: Any) -> Iterator[None]:
    kernel = subject.kernel
    subject.kernel = torch.compile(_own_code(kernel), **options)
    try:
        yield
    finally:
        subject.kernel = kernel


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
