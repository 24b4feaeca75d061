"""Whether a kernel's second derivatives are right, or refused.

Autograd takes what a kernel computes in backward for constants, unless that raises.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from veomni_core.ops.contract import Sample
from veomni_core.testing.report import CaseResult
from veomni_core.testing.sample_tensors import tensors_of, upstream_of
from veomni_core.testing.subject import Position, Subject

# A norm error: terms that are left out make it about 1, and 16-bit rounding, squared, a few hundredths.
_LIMIT = 0.2


def check_second_derivatives(subject: Subject, position: Position) -> CaseResult:
    """Compare them with the reference's in float64, on one sample."""
    exact = _penalty_gradients(subject.reference_results, subject.exact_sample(position))
    try:
        found = _penalty_gradients(subject.call, subject.draw(position))
    except Exception:  # whatever it is, nobody is given a wrong number
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
    """The gradients of the gradients' squares, zeros where there is none.

    The results are squared first, or the gradients of a linear kernel would be constants; and scaled to 1, or float16
    would overflow.
    """
    values = (*sample.args, *sample.kwargs.values())
    inputs = [tensor for value in values for _, tensor in tensors_of(value, "") if tensor.requires_grad]
    results = [result for result in call(sample) if result.requires_grad]
    scaled = [_wide(result) / _wide(result.detach()).abs().amax().clamp_min(1.0) for result in results]
    squares = [(each.square() * upstream_of(each)).sum() for each in scaled]
    gradients = torch.autograd.grad(squares, inputs, create_graph=True, allow_unused=True)
    penalties = [_wide(each).square().sum() for each in gradients if each is not None and each.requires_grad]
    found = torch.autograd.grad(penalties, inputs, allow_unused=True) if penalties else [None] * len(inputs)
    return [torch.zeros_like(x) if second is None else second for x, second in zip(inputs, found, strict=True)]


def _wide(tensor: Tensor) -> Tensor:
    """In float32 or float64; not every device has the latter."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
