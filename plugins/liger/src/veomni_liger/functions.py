"""Liger's own autograd functions, made to refuse what they would get wrong."""

from __future__ import annotations

from typing import Any

from veomni_core.ops.first_derivatives import first_derivatives_only


def first_derivative_of(function: Any) -> Any:
    """A subclass of an ``autograd.Function`` of Liger's that raises where a second derivative is asked for."""

    class Once(function):  # type: ignore[misc]
        # The function itself, not a call through its class, which torch.compile can't trace (2.13).
        backward = staticmethod(first_derivatives_only(function.backward))

    return Once
