"""Checks that a NaN or an infinity in an input reaches the results that depend on it, and no others.

Training notices a broken step by a loss or gradient norm that is not finite, and loss scaling in float16 relies on
that. On the other hand, a NaN in a masked-out token must not spread, nor one in another sequence of the batch.

One element of an input is made non-finite. A result must become non-finite if it depends on the element (it changes in
the oracle when the element changes) and is non-finite in eager code too; results that are masked may stay finite.
Gradients are checked only if the results are finite, since a non-finite loss makes them non-finite anyway. Results must
stay right where eager code keeps them finite, in the rows (along the first dimension) that do not depend on the element
and are not its own row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from veomni_conformance.sample_tensors import to_float64, upstream_of
from veomni_conformance.situations import first_of, reveal
from veomni_conformance.subject import Outcome, Position, Subject, Upstream, result_name
from veomni_ops.contract import Sample

_DEPENDS = 1e-6  # share of the root mean square below which a change may be the oracle's own rounding
_SHIFT = 0.75
_BROKEN = ((float("nan"), 0), (float("nan"), -1), (float("inf"), 0))


@dataclass(frozen=True)
class _Outcomes:
    """The outcomes around one non-finite element.

    Attributes:
        found: the kernel's outcome with the element.
        exact: the oracle's without it.
        moved: the oracle's with a finite change of that element.
        broken: the oracle's with the element.
        eager: the reference's with the element, in the check's dtype.
    """

    found: Outcome
    exact: Outcome
    moved: Outcome
    broken: Outcome
    eager: Outcome

    def tensors(
        self, kind: Literal["results", "gradients"]
    ) -> Iterator[tuple[str, Tensor, Tensor, Tensor, Tensor, Tensor]]:
        """Each tensor's name and its values in the five outcomes, in float64 on the CPU.

        Gradients that are missing in one of the outcomes are left out.
        """
        outcomes = (self.found, self.exact, self.moved, self.broken, self.eager)
        if kind == "results":
            count = len(self.exact.results)
            named = [(result_name(i, count), [each.results[i] for each in outcomes]) for i in range(count)]
        else:
            named = [
                (
                    f"the gradient of {name}",
                    [gradient for each in outcomes if (gradient := each.gradients[name]) is not None],
                )
                for name in self.found.gradients
            ]
        for what, tensors in named:
            if len(tensors) == len(outcomes):
                found, exact, moved, broken, eager = (tensor.detach().cpu().double() for tensor in tensors)
                yield what, found, exact, moved, broken, eager


def check_non_finite(subject: Subject, position: Position) -> Iterator[str]:
    """Put NaN or infinity into the first or last element of each input in turn, and of an incoming gradient."""
    sample = subject.sample(position)
    yield from first_of(
        sentence
        for name, tensor in subject.differentiable(sample).items()
        if tensor.numel()
        for value, element in _BROKEN
        for sentence in reveal(
            f"with {value} as the {'last' if element else 'first'} element of {name}",
            lambda n=name, v=value, e=element: _in_an_input(subject, position, n, v, e),  # type: ignore[misc]
        )
    )
    if subject.spec.backward and all(result.numel() for result in subject.exact(position).results):
        yield from first_of(
            sentence
            for value, element in _BROKEN
            for sentence in reveal(
                f"with {value} as the {'last' if element else 'first'} element of the incoming gradient",
                lambda v=value, e=element: _in_the_upstream(subject, position, v, e),  # type: ignore[misc]
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

    found = subject.outcome(changed(value))
    finite = all(bool(result.isfinite().all()) for result in found.results)
    # A reference's backward takes longer than its forward, and is not asked where the loss is not finite.
    reference = subject.reference if finite else subject.reference_forward
    outcomes = _Outcomes(
        found,
        exact=subject.exact(position),
        moved=reference(to_float64(changed(None))),
        broken=reference(to_float64(changed(value))),
        eager=reference(changed(value)),
    )
    tensor = subject.inputs(subject.sample(position))[name]
    own_row = (tensor.shape[0], element % tensor.shape[0]) if tensor.dim() else (1, 0)
    if problem := _hidden(outcomes, "results") or _spread(subject, outcomes, own_row):
        return problem
    return _hidden(outcomes, "gradients") if finite else None


def _in_the_upstream(subject: Subject, position: Position, value: float, element: int) -> str | None:
    def changed(to: float | None) -> Upstream:
        def upstream(result: Tensor) -> Tensor:
            sent = upstream_of(result)
            place = sent[_last(sent) if element else (0,) * sent.dim()]
            place.copy_(place + _SHIFT if to is None else torch.full_like(place, to))
            return sent

        return upstream

    outcomes = _Outcomes(
        subject.outcome(subject.draw(position), changed(value)),
        exact=subject.exact(position),
        moved=subject.reference(subject.exact_sample(position), changed(None)),
        broken=subject.reference(subject.exact_sample(position), changed(value)),
        eager=subject.reference(subject.draw(position), changed(value)),
    )
    return _hidden(outcomes, "gradients")


def _last(tensor: Tensor) -> tuple[int, ...]:
    return tuple(size - 1 for size in tensor.shape)


def _hidden(outcomes: _Outcomes, kind: Literal["results", "gradients"]) -> str | None:
    """A sentence if the kernel's outcome is finite in places where it must not be."""
    for what, found, exact, moved, broken, eager in outcomes.tensors(kind):
        lost = _depends(exact, moved) & ~broken.isfinite() & ~eager.isfinite() & found.isfinite()
        if bool(lost.any()):
            return f"{what} is finite in {int(lost.sum())} places that depend on it"
    return None


def _spread(subject: Subject, outcomes: _Outcomes, own_row: tuple[int, int]) -> str | None:
    """A sentence if the kernel's results are wrong in rows that do not depend on the element."""
    allowed = subject.contract.values[subject.dtype_name].element
    for what, found, exact, moved, broken, eager in outcomes.tensors("results"):
        if not exact.numel():
            continue
        limit = allowed * (broken.abs() + _rms(exact))
        # Next to an infinity, rounding may decide what is clamped. Places where eager code itself is off are skipped.
        intact = broken.isfinite() & ((eager - broken).abs() <= limit)
        rows = _depends(exact, moved).reshape(exact.shape[0] if exact.dim() else 1, -1).any(dim=1)
        if exact.dim() and exact.shape[0] == own_row[0]:
            rows[own_row[1]] = True
        intact &= ~rows.view(-1, *[1] * (exact.dim() - 1)) if exact.dim() else ~rows.view(())
        wrong = intact & ~((found - broken).abs() <= limit)
        if bool(wrong.any()):
            return f"{what} is another in {int(wrong.sum())} places that have nothing to do with it"
    return None


def _depends(exact: Tensor, moved: Tensor) -> Tensor:
    return (moved - exact).abs() > _DEPENDS * _rms(exact)


def _rms(tensor: Tensor) -> Tensor:
    return tensor.square().mean().sqrt() if tensor.numel() else tensor.new_zeros(())
