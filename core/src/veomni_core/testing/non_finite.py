"""Does a NaN or an infinity come out where it mathematically must, and nowhere else?

Training learns of a broken step from a loss or a gradient norm that is not finite, and loss scaling of float16 lives on
that; while a token that is masked out, or another sequence of the batch, must not suffer.

What must turn non-finite is what depends on the element, as the oracle shows when the element changes, and is
non-finite in eager too: skipping what is masked is right. What must stay right is what eager keeps finite.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from veomni_core.ops.contract import Sample
from veomni_core.testing.sample_tensors import to_float64, upstream_of
from veomni_core.testing.situations import first_of, reveal
from veomni_core.testing.subject import Outcome, Position, Subject, Upstream, result_name

_DEPENDS = 1e-6  # of the root mean square; below it a change may be the oracle's own rounding
_SHIFT = 0.75


def check_non_finite(subject: Subject, position: Position) -> Iterator[str]:
    """Put a NaN and an infinity into the ends of each input in turn, and a NaN into an incoming gradient."""
    sample = subject.sample(position)
    yield from first_of(
        sentence
        for name, tensor in subject.differentiable(sample).items()
        if tensor.numel()
        for value, element in ((float("nan"), 0), (float("nan"), -1), (float("inf"), 0))
        for sentence in reveal(
            f"with {value} as the {'last' if element else 'first'} element of {name}",
            lambda n=name, v=value, e=element: _in_an_input(subject, position, n, v, e),  # type: ignore[misc]
        )
    )
    if subject.spec.backward and all(result.numel() for result in subject.exact(position).results):
        yield from first_of(
            sentence
            for element in (0, -1)
            for sentence in reveal(
                f"with NaN as the {'last' if element else 'first'} element of the incoming gradient",
                lambda e=element: _in_the_upstream(subject, position, e),  # type: ignore[misc]
            )
        )


def _in_an_input(subject: Subject, position: Position, name: str, value: float, element: int) -> str | None:
    def changed(to: float | None) -> Sample:
        sample = subject.draw(position)
        tensor = subject.inputs(sample)[name]
        with torch.no_grad():
            place = tensor[_last(tensor) if element else (0,) * tensor.dim()]
            place.copy_(place + _SHIFT if to is None else torch.full_like(place, to))
        return sample

    moved = subject.reference(to_float64(changed(None)))
    broken = subject.reference(to_float64(changed(value)))
    eager = subject.reference(changed(value))
    return _compare(subject, subject.outcome(changed(value)), subject.exact(position), moved, broken, eager)


def _in_the_upstream(subject: Subject, position: Position, element: int) -> str | None:
    def changed(to: float | None) -> Upstream:
        def upstream(result: Tensor) -> Tensor:
            sent = upstream_of(result)
            place = sent[_last(sent) if element else (0,) * sent.dim()]
            place.copy_(place + _SHIFT if to is None else torch.full_like(place, to))
            return sent

        return upstream

    nan = changed(float("nan"))
    moved = subject.reference(to_float64(subject.draw(position)), changed(None))
    broken = subject.reference(to_float64(subject.draw(position)), nan)
    eager = subject.reference(subject.draw(position), nan)
    return _compare(
        subject, subject.outcome(subject.draw(position), nan), subject.exact(position), moved, broken, eager
    )


def _last(tensor: Tensor) -> tuple[int, ...]:
    return tuple(size - 1 for size in tensor.shape)


def _compare(
    subject: Subject, found: Outcome, exact: Outcome, moved: Outcome, broken: Outcome, eager: Outcome
) -> str | None:
    count = len(exact.results)
    tolerances = (subject.contract.values[subject.dtype_name], subject.contract.gradients[subject.dtype_name])
    pairs = [
        (result_name(index, count), tolerances[0], *tensors)
        for index, tensors in enumerate(
            zip(found.results, exact.results, moved.results, broken.results, eager.results, strict=True)
        )
    ]
    for name, gradient in found.gradients.items():
        others = [outcome.gradients[name] for outcome in (exact, moved, broken, eager)]
        if gradient is not None and all(other is not None for other in others):
            pairs.append((f"the gradient of {name}", tolerances[1], gradient, *others))  # type: ignore[arg-type]
    for what, allowed, mine, before, after, wanted, in_dtype in pairs:
        mine, in_dtype = mine.detach().cpu().double(), in_dtype.detach().cpu().double()
        rms = before.square().mean().sqrt() if before.numel() else 0.0
        depends = (after - before).abs() > _DEPENDS * rms
        lost = depends & ~wanted.isfinite() & ~in_dtype.isfinite() & mine.isfinite()
        if bool(lost.any()):
            return f"{what} is finite in {int(lost.sum())} places that depend on it"
        intact = wanted.isfinite() & in_dtype.isfinite()
        if bool((intact & ~mine.isfinite()).any()):
            return f"{what} is not finite in {int((intact & ~mine.isfinite()).sum())} places where eager is"
        error = torch.where(intact, (mine - wanted).abs(), 0.0)
        if bool((error > torch.where(intact, allowed.element * (wanted.abs() + rms), 1.0)).any()):
            return f"{what} changes by {float(error.max()):.1e} in places where eager is finite"
    return None
