"""Checks that a kernel agrees with eager code where inputs have different dtypes.

Under autocast, activations are in 16 bits and weights in float32; 16-bit models keep routers, norms and rotary angles
in float32. Combinations that eager code can't compute either are skipped. With mixed dtypes, a kernel may raise an
error with a message.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from veomni_conformance.comparison import plain
from veomni_conformance.sample_tensors import map_tensors
from veomni_conformance.situations import first_of, reveal
from veomni_conformance.subject import Outcome, Position, Subject
from veomni_core.errors import ContractError
from veomni_ops.contract import Sample, dtype_name


def check_autocast(subject: Subject, position: Position) -> Iterator[str]:
    """Run forward under autocast, and backward outside and inside of it, with every input in the check's dtype.

    A float32 kernel gets the values of the contract's 16-bit samples, which rounding can't move across a discontinuity.
    """
    low = torch.bfloat16 if subject.dtype == torch.float32 else subject.dtype
    if not _covers(subject, low):
        return
    rounded = subject if low == subject.dtype else subject.in_dtype(low)
    if not rounded.has(position):
        return

    def sample() -> Sample:
        return map_tensors(rounded.draw(position), partial(_as_dtype, dtype=subject.dtype))

    plain_words = f"on values that {plain(low)} holds, without autocast"
    yield from first_of(
        sentence
        for inside, words in ((False, ""), (True, ", backward too"))
        for sentence in reveal(
            f"under autocast to {plain(low)}{words}",
            lambda i=inside: _compare(rounded, position, sample(), low, i, subject.dtype),  # type: ignore[misc]
            without=(plain_words, lambda: _compare(rounded, position, sample(), None, False, subject.dtype)),
        )
    )


def check_other_dtypes(subject: Subject, position: Position) -> Iterator[str]:
    """Run in the kernel's other dtypes after this one: an instance that is kept for a shape is of one dtype."""
    names = (name for name in subject.spec.dtypes if name != subject.dtype_name)
    others = [subject.in_dtype(dtype) for dtype in (getattr(torch, name) for name in names) if _covers(subject, dtype)]
    yield from first_of(
        sentence
        for other in others
        if other.has(position)
        for sentence in reveal(
            f"in {plain(other.dtype)}, after calls in {plain(subject.dtype)}",
            lambda o=other: o.plain_problem(position),  # type: ignore[misc]
        )
    )


def _covers(subject: Subject, dtype: torch.dtype) -> bool:
    name = dtype_name(dtype)
    return name in subject.contract.values and name in subject.contract.gradients


def _as_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.detach().to(dtype).requires_grad_(tensor.requires_grad) if tensor.is_floating_point() else tensor


def check_mixed_dtypes(subject: Subject, position: Position) -> Iterator[str]:
    """For a 16-bit dtype: cast each input to float32, and all inputs but each, with and without autocast."""
    if subject.dtype == torch.float32:
        return
    inputs = subject.inputs(subject.sample(position))
    names = [name for name, tensor in inputs.items() if tensor.dtype == subject.dtype]
    choices: list[tuple[str, ...]] = [(name,) for name in names]
    if len(names) > 2:
        choices += [tuple(other for other in names if other != name) for name in names]
    for low, words in ((None, ""), (subject.dtype, f" under autocast to {subject.dtype_name}")):
        yield from first_of(
            sentence
            for wide in choices
            for sentence in reveal(
                f"with {' and '.join(wide)} in float32 and the rest in {subject.dtype_name}{words}",
                lambda w=wide, a=low: _compare(subject, position, _widened(subject, position, w), a),  # type: ignore[misc]
                may_refuse=True,
            )
        )


def _autocast(subject: Subject, low: torch.dtype | None) -> AbstractContextManager[Any]:
    return nullcontext() if low is None else torch.autocast(subject.device.type, low)


def _compare(
    subject: Subject,
    position: Position,
    sample: Sample,
    low: torch.dtype | None,
    backward_inside: bool = False,
    dtype: torch.dtype | None = None,
) -> str | None:
    """Compare with the oracle. ``dtype`` is the dtype of all inputs if they share one.

    The tolerance is that of this dtype, or else of the check's dtype, if eager code meets it; else that of ``low``.
    """
    exact = subject.exact(position)
    try:
        eager = _outcome(subject, sample, low, backward_inside, of_reference=True)
    except ContractError:  # eager code can't compute it either
        return None
    # Require the accuracy that eager code reaches: autocast rounds the inputs of some ops to 16 bits, but not of all.
    tolerances_of = dtype_name(dtype or subject.dtype)
    if subject.problem(eager, exact, tolerances_of) is not None:
        tolerances_of = dtype_name(low or subject.dtype)
        if subject.problem(eager, exact, tolerances_of) is not None:
            return None
    found = _outcome(subject, sample, low, backward_inside, of_reference=False)
    if dtype is None:
        plain_dtypes = subject.result_dtypes(position)
    else:
        plain_dtypes = [result.dtype for result in subject.reference_results(sample)]
    for result, wanted, without in zip(found.results, eager.results, plain_dtypes, strict=True):
        # Autocast has no rule for a kernel, so the kernel may also compute in the dtypes that it is given.
        if result.dtype != wanted.dtype and (low is None or result.dtype != without):
            return f"it gives dtype {plain(result.dtype)}, eager gives {plain(wanted.dtype)}"
    return subject.problem(found, exact, tolerances_of)


def _outcome(
    subject: Subject, sample: Sample, low: torch.dtype | None, backward_inside: bool, of_reference: bool
) -> Outcome:
    copied = map_tensors(sample, lambda t: t.detach().requires_grad_(t.requires_grad))
    with _autocast(subject, low):
        results = subject.reference_results(copied) if of_reference else subject.call(copied)
    with _autocast(subject, low if backward_inside else None):
        gradients = subject.gradients(results, copied) if subject.spec.backward else {}
    return Outcome(tuple(result.detach() for result in results), gradients)


def _widened(subject: Subject, position: Position, wide: tuple[str, ...]) -> Sample:
    sample = subject.draw(position)
    chosen = {id(tensor) for name, tensor in subject.inputs(sample).items() if name in wide}

    def widen(tensor: Tensor) -> Tensor:
        if id(tensor) not in chosen:
            return tensor
        return tensor.detach().float().requires_grad_(tensor.requires_grad)

    return map_tensors(sample, widen)
