"""Checks that a kernel's second derivatives are right, or that double backward raises.

If a kernel's backward can't be differentiated and does not raise, autograd treats its results as constants.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from veomni_conformance.report import CaseResult
from veomni_conformance.sample_tensors import tensors_of, upstream_of
from veomni_conformance.subject import Position, Subject
from veomni_ops.contract import Sample

# Bound of the norm error. Missing terms give an error of about 1, and 16-bit rounding a few hundredths.
_LIMIT = 0.2


def check_second_derivatives(subject: Subject, position: Position) -> CaseResult:
    """Compare second derivatives with the float64 reference's, on one sample."""
    exact = _penalty_gradients(subject.reference_results, subject.exact_sample(position))
    try:
        found = _penalty_gradients(subject.call, subject.draw(position))
    except Exception:  # any error will do: nobody gets a wrong number
        return CaseResult("second derivatives (refused)", ())
    errors = [
        float((mine.cpu().double() - wanted).norm() / wanted.norm())
        for mine, wanted in zip(found, exact, strict=True)
        if bool(wanted.any())
    ]
    wrong = [error for error in errors if not error <= _LIMIT]
    problem = (f"they are off, and nothing was raised: norm error {max(wrong):.1e}",) if wrong else ()
    return CaseResult("second derivatives", problem)


def _penalty_gradients(call: Callable[[Sample], tuple[Tensor, ...]], sample: Sample) -> list[Tensor]:
    """The gradients of a gradient penalty (the sum of all squared gradients); zeros where there is no gradient.

    The results are squared first, since the gradients of a linear kernel would otherwise be constants, and scaled to at
    most 1, since float16 would overflow.
    """
    values = (*sample.args, *sample.kwargs.values())
    inputs = [tensor for value in values for _, tensor in tensors_of(value, "") if tensor.requires_grad]
    results = [result for result in call(sample) if result.requires_grad]
    if not inputs:  # of an op that chooses
        return []
    scaled = [_wide(result) / _wide(result.detach()).abs().amax().clamp_min(1.0) for result in results]
    squares = [(each.square() * upstream_of(each)).sum() for each in scaled]
    gradients = torch.autograd.grad(squares, inputs, create_graph=True, allow_unused=True)
    penalties = [_wide(each).square().sum() for each in gradients if each is not None and each.requires_grad]
    found = torch.autograd.grad(penalties, inputs, allow_unused=True) if penalties else [None] * len(inputs)
    return [torch.zeros_like(x) if second is None else second for x, second in zip(inputs, found, strict=True)]


def _wide(tensor: Tensor) -> Tensor:
    """``tensor`` in at least float32. Not every device has float64."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
