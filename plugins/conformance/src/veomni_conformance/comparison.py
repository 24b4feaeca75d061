"""Compares tensors: the distance from the exact result, equality, and shared memory."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.linalg import vector_norm

from veomni_ops.contract import Tolerance

_NEAR = 1.5  # times the tolerance: another order of summation may be all that is wrong


def distance(found: Tensor, exact: Tensor, allowed: Tolerance, what: str) -> tuple[float, str | None]:
    """The largest error of ``found`` as a share of the tolerance, and a sentence if it exceeds the tolerance.

    If all of ``exact`` (float64) is zero, all of ``found`` must be zero too. Integers must be equal. ``what`` names the
    tensor in the sentence.
    """
    if found.shape != exact.shape:
        return float("inf"), f"{what} has shape {plain(found.shape)}, expected {plain(exact.shape)}"
    if not exact.numel():
        return 0.0, None
    exact = exact.detach()
    if not exact.is_floating_point():
        wrong = int((found.to(exact.device) != exact).sum())
        return (float("inf"), f"{what} is another integer in {wrong} places") if wrong else (0.0, None)
    error, norm = (found.detach().to(exact.device).double() - exact).abs(), vector_norm(exact)
    root_mean_square = norm / math.sqrt(exact.numel())
    # Read together: each of them alone would wait for the GPU. The largest of NaN and numbers is NaN.
    largest, rms, element, in_norm = torch.stack(
        (
            error.max(),
            root_mean_square,
            (error / (exact.abs() + root_mean_square)).max(),
            vector_norm(error) / norm,
        )
    ).tolist()
    if not math.isfinite(largest):
        return float("inf"), f"{what} is not finite"
    if rms == 0.0:
        return (0.0, None) if largest == 0.0 else (float("inf"), f"{what} is {largest:.1e}, expected exactly zero")
    problem = None
    for measure, value, limit in (("element", element, allowed.element), ("norm", in_norm, allowed.norm)):
        if value > limit:
            near = ", near the limit" if value <= _NEAR * limit else ""
            problem = f"{what} is off: {measure} error {value:.1e}, allowed {limit:.1e}{near}"
            break
    return max(element / allowed.element, in_norm / allowed.norm), problem


def bias(found: Tensor, exact: Tensor) -> tuple[float, float]:
    """By which share ``found`` is longer than ``exact`` along it, and its distance from it as a share of its norm."""
    exact = exact.detach().flatten()
    error, norm = found.detach().to(exact.device).double().flatten() - exact, vector_norm(exact)
    along, away = torch.stack((torch.dot(error, exact) / norm.square(), vector_norm(error) / norm)).tolist()
    return along, away


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold equal values; NaN counts as equal to NaN."""
    return torch.equal(a, b) or (a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all()))


def share_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors share a storage, an empty one too, so that writing into one could change the other."""
    return bool(a.untyped_storage()._cdata == b.untyped_storage()._cdata)


def plain(value: Any) -> str:
    """A shape, dtype or device for messages: ``(2, 3)``, ``bfloat16``."""
    return str(tuple(value)) if isinstance(value, torch.Size) else str(value).removeprefix("torch.")


def one_line(error: BaseException) -> str:
    """An exception's type and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
