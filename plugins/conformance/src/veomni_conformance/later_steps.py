"""Checks that later training steps are computed as correctly as the first: nothing stale is reused.

Between steps, the optimizer writes into the weights in place, or through ``.data`` (FSDP1, DeepSpeed). Tensors are
freed and others are allocated at the same address. Results and gradients of the previous step may still be in use, or
be overwritten.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from veomni_conformance.comparison import same
from veomni_conformance.sample_tensors import map_tensors, overwrite
from veomni_conformance.situations import first_of, reveal
from veomni_conformance.subject import Outcome, Position, Subject
from veomni_ops.contract import Sample, Size

_RECYCLED = 3
_Run = Callable[[Sample], Outcome]


def check_later_steps(subject: Subject, position: Position) -> Iterator[str]:
    """Call again: on the same tensors with other values, on new tensors at old addresses, after overwriting results."""
    for words, run in (("", subject.outcome), (" and nothing wants a gradient", _validate(subject))):
        yield from reveal(
            f"where its inputs were changed in place since its last call{words}",
            lambda r=run: _in_place(subject, position, r),  # type: ignore[misc]
        )
        yield from reveal(
            f"where tensors of another call were freed and others allocated{words}",
            lambda r=run: _recycled(subject, position, r),  # type: ignore[misc]
        )
        yield from reveal(
            f"once it is called again{words}",
            lambda r=run: _kept_results(subject, position, r),  # type: ignore[misc]
        )
    yield from reveal("once its results and gradients were freed", lambda: _kept_alive(subject, position))


def check_other_integers(subject: Subject, positions: list[Position]) -> Iterator[str]:
    """Call on the same tensors with the next batch's integers too, as a loader writes into buffers that it keeps."""
    yield from first_of(
        sentence
        for position, following in _of_equal_shapes(subject, positions)
        for sentence in reveal(
            f"where the inputs of {subject.sample(position).name!r} were written over with those of "
            f"{subject.sample(following).name!r}, integers too",
            lambda p=position, f=following: _next_batch(subject, p, f),  # type: ignore[misc]
        )
    )


def _of_equal_shapes(subject: Subject, positions: list[Position]) -> Iterator[tuple[Position, Position]]:
    """Pairs of small calls that differ in the values of their tensors alone, those of integers among them."""
    first: dict[str, tuple[Position, list[Tensor]]] = {}
    for position in positions:
        sample = subject.sample(position)
        if position.size is Size.SMALL:
            integers = [tensor for tensor in subject.inputs(sample).values() if not tensor.is_floating_point()]
            shapes = map_tensors(sample, lambda tensor: tensor.detach().to("meta").requires_grad_(tensor.requires_grad))
            before = first.setdefault(f"{shapes.args} {sorted(shapes.kwargs.items())}", (position, integers))
            if not all(map(torch.equal, integers, before[1])):
                yield before[0], position


def _next_batch(subject: Subject, position: Position, following: Position) -> str | None:
    sample = subject.draw(position)
    subject.outcome(sample)
    for through_data, each in ((False, following), (True, position)):  # as a new tensor at an old address is, too
        sample = overwrite(sample, subject.draw(each), through_data)
        if problem := subject.problem(subject.outcome(sample), subject.exact(each)):
            return problem
    return None


def _validate(subject: Subject) -> _Run:
    """Makes calls as validation does: under ``no_grad``, with inputs that require no gradients."""

    def run(sample: Sample) -> Outcome:
        with torch.no_grad():
            # Restored afterwards, since the same tensors are overwritten and used in a second call.
            wanting = list(subject.differentiable(sample).values())
            for tensor in wanting:
                tensor.requires_grad_(False)
            results = subject.call(sample)
            for tensor in wanting:
                tensor.requires_grad_(True)
            return Outcome(results)

    return run


def _in_place(subject: Subject, position: Position, run: _Run) -> str | None:
    sample = subject.draw(position)
    run(sample)
    # In-place writes that raise the version counter of each tensor, as optimizers do them.
    sample = overwrite(sample, subject.draw(position, other=True))
    if problem := subject.problem(run(sample), subject.exact(position, other=True)):
        return problem
    # Writes through `.data`, which don't raise it.
    sample = overwrite(sample, subject.draw(position), through_data=True)
    return subject.problem(run(sample), subject.exact(position))


def _recycled(subject: Subject, position: Position, run: _Run) -> str | None:
    for turn in range(2 * _RECYCLED):
        other = bool(turn % 2)
        if problem := subject.problem(run(subject.draw(position, other)), subject.exact(position, other)):
            return problem
    return None


def _kept_results(subject: Subject, position: Position, run: _Run) -> str | None:
    first = run(subject.draw(position))
    copies = [tensor.clone() for tensor in _tensors(first)]
    for other in (False, True):
        run(subject.draw(position, other))
    if not all(same(kept, copy) for kept, copy in zip(_tensors(first), copies, strict=True)):
        return "the results or gradients that it gave before change"
    for tensor in _tensors(first):  # overwritten, as by gradient clipping or buffer reuse
        if all(stride or size < 2 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
            tensor.fill_(3.0)
    problem = subject.problem(run(subject.draw(position, other=True)), subject.exact(position, other=True))
    problem = problem or subject.problem(run(subject.draw(position)), subject.exact(position))
    return problem and f"and what it gave before was written over, {problem}"


def _kept_alive(subject: Subject, position: Position) -> str | None:
    gc.freeze()  # don't search the objects that exist already, which takes 0.15 s with torch
    try:
        watched = _watched(subject, subject.draw(position))
        gc.collect()
    finally:
        gc.unfreeze()
    alive = [name for name, reference in watched.items() if reference() is not None]
    return f"it still holds {', '.join(alive)}: training never gets that memory back" if alive else None


def _watched(subject: Subject, sample: Sample) -> dict[str, weakref.ref[Tensor]]:
    outcome = subject.outcome(sample)
    tensors = {**subject.inputs(sample), **{f"result {i}": result for i, result in enumerate(outcome.results)}}
    return {name: weakref.ref(tensor) for name, tensor in tensors.items()}


def _tensors(outcome: Outcome) -> list[Tensor]:
    return [*outcome.results, *(gradient for gradient in outcome.gradients.values() if gradient is not None)]
