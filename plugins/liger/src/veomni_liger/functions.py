"""Liger's autograd functions, changed to raise for second derivatives, which they would compute wrongly."""

from __future__ import annotations

from typing import Any

from veomni_core.kernels import first_derivatives_only


def first_derivative_of(function: Any) -> Any:
    """A subclass of Liger's ``autograd.Function`` whose backward raises if a second derivative is requested."""

    class Once(function):  # type: ignore[misc]
        # Wraps the function itself: torch.compile (2.13) can't trace a call through the class.
        backward = staticmethod(first_derivatives_only(function.backward))

    return Once
